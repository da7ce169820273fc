"""Making a project, and reproducing it with DVC."""

import logging
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from comlrl_core.config.files import read_params
from flows import pipeline
from flows.environment import env_defaults
from flows.jobs import plan, user_files
from flows.package_lock import write_lock
from flows.prefect_api import die_with_parent
from flows.preflight import check_settings
from flows.project import Project
from flows.prune import PRUNED_FOLDERS, is_pruned, missing_file
from tasks.job import Job
from tasks.pruned import pruned_folder
from tasks.tracking_store import ensure_database

logger = logging.getLogger("comlrl_core.stages")

TEMPLATES = {
    "params.yaml": "params.yaml",
    "pipeline.yaml": "dvc.yaml",  # under its own name DVC would take the template for a pipeline of this repository
    "my_rewards.py": "my_rewards.py",
    "gitignore": ".gitignore",
    "dvcignore": ".dvcignore",
}


def initialise(folder: Path) -> None:
    """Make `folder` a project, or complete one: files that are there stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    source = resources.files("flows") / "templates"
    made = []
    for template, name in TEMPLATES.items():
        target = folder / name
        if not target.exists():
            with resources.as_file(source / template) as path:
                shutil.copyfile(path, target)
            made.append(name)
    project = Project.at(folder)
    env_defaults(project.state_root)
    kind = pipeline.init(project.work_root)
    bring_up_to_date(project)
    ensure_database(project.state_root)
    print(f"{project.work_root}: {', '.join(made) or 'all files were there'}; DVC: {kind}; next: comlrl run")


def bring_up_to_date(project: Project) -> None:
    """Write `comlrl.lock`, and the user's files into the dependencies of `dvc.yaml`."""
    config = read_params(project.params).run_config()
    write_lock(project.work_root)
    pipeline.sync_dependencies(project.dvc_yaml, user_files(plan(project, config).job))


def reproduce(project: Project, arguments: list[str]) -> int:
    """`dvc repro` in the project, with this interpreter first on the path and the project held throughout.

    Outputs that are missing although nobody pruned them come back first, unless `arguments` say what to do.
    """
    job = plan(project, read_params(project.params).run_config()).job
    check_settings(job, project.params)
    with project.run_lock("repro", children=True):
        bring_up_to_date(project)
        again = [] if arguments or not pipeline.is_tracked(project.work_root) else bring_back(job)
        if again:
            code = _repro(project, ["--single-item", "--force", *again])
            if code != 0:
                return code
        return _repro(project, arguments)


def bring_back(job: Job) -> list[str]:
    """Restore missing outputs from DVC's cache; the stages of those that it lacks and that nothing else would run.

    DVC itself passes over them under `--allow-missing`, which pruned iterations need.
    """
    again = []
    for stage, gone in pipeline.bring_back_outputs(job.work_root).items():
        number = int(stage.partition("@")[2] or 0)
        if _were_pruned(job, number, gone):
            continue
        changed = pipeline.status(job.work_root, stage)
        only_missing = all(missing_file(line, "outs") or missing_file(line, "deps") for line in changed)
        if only_missing and not is_pruned(job, changed, number):
            logger.info("%s runs again: %s missing", stage, ", ".join(gone))
            again.append(stage)
    return again


def _were_pruned(job: Job, iteration: int, gone: list[str]) -> bool:
    """Whether `comlrl prune` removed these outputs here; only asking DVC takes long."""
    return pruned_folder(job.work_root, iteration).is_dir() and all(
        Path(name).parts[0] in PRUNED_FOLDERS for name in gone
    )


def _repro(project: Project, arguments: list[str]) -> int:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    command = [sys.executable, "-m", "dvc", "repro", "--allow-missing", *arguments]
    dies_with_us = die_with_parent if sys.platform == "linux" else None
    return subprocess.run(
        command, cwd=project.work_root, env=environment, check=False, preexec_fn=dies_with_us
    ).returncode
