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
    """`dvc repro` in the project, with this interpreter first on the path and the project held throughout."""
    check_settings(plan(project, read_params(project.params).run_config()).job, project.params)
    with project.run_lock("repro", children=True):
        bring_up_to_date(project)
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        command = [sys.executable, "-m", "dvc", "repro", "--allow-missing", *arguments]
        dies_with_us = die_with_parent if sys.platform == "linux" else None
        return subprocess.run(
            command, cwd=project.work_root, env=environment, check=False, preexec_fn=dies_with_us
        ).returncode
