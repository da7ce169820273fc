"""Against real DVC, where a project can lie: in a git repository, in a folder of one, without git."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows import pipeline

PARAMS = """\
seed: 1
other: 1
last_iteration: '0001'
num_iterations: 1
iterations:
  '0001': {previous: '0000'}
"""
DVC = """\
stages:
  prepare:
    cmd: python stage.py prepare 0000
    deps: [comlrl.lock]
    params: [seed]
    outs: [models/iteration_0000]
  iterate:
    foreach: ${iterations}
    do:
      cmd: python stage.py iterate ${key}
      deps:
        - comlrl.lock
        - models/iteration_${item.previous}
      params: [seed]
      outs:
        - replay/iteration_${key}.json
        - models/iteration_${key}
  evaluate:
    cmd: python stage.py evaluate ${last_iteration}
    deps:
      - models/iteration_${last_iteration}
    metrics:
      - metrics.json: {cache: false}
"""
STAGE = """\
import sys
from pathlib import Path
name, key = sys.argv[1:]
with open("runs.log", "a") as log:
    log.write(f"{name} {key}\\n")
if name == "evaluate":
    Path("metrics.json").write_text('{"reward": 1}')
else:
    Path(f"models/iteration_{key}").mkdir(parents=True)
    for part in ("a", "b"):
        Path(f"models/iteration_{key}/{part}").write_text(f"{name} {key} {part}")
    if name == "iterate":
        Path("replay").mkdir(exist_ok=True)
        Path(f"replay/iteration_{key}.json").write_text("{}")
"""
STAGES = ("prepare", "iterate@0001", "evaluate")


@pytest.fixture(params=["git", "subdir", "no-scm"])
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    root = tmp_path / "repository" / "project" if request.param == "subdir" else tmp_path / "project"
    root.mkdir(parents=True)
    if request.param != "no-scm":
        subprocess.run(["git", "init", "-q", root if request.param == "git" else root.parent], check=True)
    for name, text in (("params.yaml", PARAMS), ("dvc.yaml", DVC), ("stage.py", STAGE), ("comlrl.lock", "1")):
        (root / name).write_text(text)
    assert not pipeline.is_tracked(root)
    assert pipeline.init(root) == request.param
    return root


def run(root: Path, name: str) -> None:
    stage, _, key = name.partition("@")
    key = key or ("0000" if stage == "prepare" else "0001")
    subprocess.run([sys.executable, "stage.py", stage, key], cwd=root, check=True)


def run_all(root: Path) -> None:
    for name in STAGES:
        run(root, name)
        assert pipeline.commit(root, name)


def repro(root: Path) -> list[str]:
    """The stages that `dvc repro` runs."""
    log = root / "runs.log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    subprocess.run([f"{sys.prefix}/bin/dvc", "repro", "-q"], cwd=root, check=True)
    return log.read_text().splitlines()[before:]


def test_what_a_run_committed_is_up_to_date_for_dvc(project: Path) -> None:
    """The contract of the two doors: after `comlrl run` there is nothing left for `dvc repro` to do."""
    assert pipeline.is_tracked(project)
    assert not pipeline.is_current(project, "prepare")
    assert not pipeline.is_current(project, "iterate@0001")  # its dependency does not even exist
    run_all(project)
    assert all(pipeline.is_current(project, name) for name in STAGES)
    assert repro(project) == []

    pipeline.set_iterations(project / "params.yaml", 2)
    assert pipeline.is_current(project, "iterate@0001")
    assert not pipeline.is_current(project, "iterate@0002")
    assert repro(project) == ["iterate 0002", "evaluate 0002"]
    assert all(pipeline.is_current(project, name) for name in (*STAGES, "iterate@0002"))

    (project / "params.yaml").write_text((project / "params.yaml").read_text().replace("other: 1", "other: 2"))
    assert pipeline.is_current(project, "iterate@0001")
    (project / "params.yaml").write_text((project / "params.yaml").read_text().replace("seed: 1", "seed: 2"))
    assert pipeline.status(project, "iterate@0001") == ["changed deps: params.yaml (seed modified)"]

    if (project / ".git").exists():
        ignored = subprocess.run(["git", "status", "--short"], cwd=project, capture_output=True, text=True, check=True)
        assert "models/iteration" not in ignored.stdout


def test_missing_outputs_come_back_without_running(project: Path) -> None:
    run_all(project)
    shutil.rmtree(project / "models" / "iteration_0001")
    (project / "replay" / "iteration_0001.json").unlink()
    assert pipeline.restore(project, "iterate@0001")
    assert pipeline.is_current(project, "iterate@0001")
    (project / "models" / "iteration_0001" / "a").unlink()  # damaged
    assert pipeline.restore(project, "iterate@0001")
    assert pipeline.is_current(project, "iterate@0001")
    assert pipeline.restore(project, "iterate@0001")  # nothing to do

    (project / "dvc.lock").unlink()  # only the run cache knows
    shutil.rmtree(project / "models" / "iteration_0000")
    assert pipeline.restore(project, "prepare")
    assert all(pipeline.restore(project, name) for name in STAGES)
    assert repro(project) == []

    (project / "params.yaml").write_text(PARAMS.replace("seed: 1", "seed: 2"))
    assert not pipeline.restore(project, "iterate@0001")
    assert (project / "models" / "iteration_0001" / "a").is_file()
    assert repro(project)[0] == "prepare 0000"
    (project / "params.yaml").write_text(PARAMS)  # back: the results of the first run are in the run cache
    assert pipeline.restore(project, "prepare")
    assert pipeline.restore(project, "iterate@0001")


def test_outputs_edited_by_hand_are_not_overwritten(project: Path) -> None:
    run(project, "prepare")
    pipeline.commit(project, "prepare")
    file = project / "models" / "iteration_0000" / "a"
    file.unlink()
    file.write_text("by hand")
    assert not pipeline.restore(project, "prepare")
    assert file.read_text() == "by hand"


def test_results_are_not_committed_when_the_inputs_changed_meanwhile(project: Path, caplog) -> None:
    run(project, "prepare")
    before = pipeline.inputs_digest(project, "prepare")
    assert pipeline.inputs_digest(project, "prepare") == before
    (project / "comlrl.lock").write_text("2")
    assert not pipeline.commit(project, "prepare", expected_inputs=before)
    assert "changed while it ran" in caplog.text
    assert not (project / "dvc.lock").exists()
    assert pipeline.commit(project, "prepare", expected_inputs=pipeline.inputs_digest(project, "prepare"))
    assert pipeline.is_current(project, "prepare")


def test_dvc_errors_name_stage_and_reason(project: Path) -> None:
    with pytest.raises(pipeline.PipelineError, match=r"cannot read the status of nothing .*dvc.yaml"):
        pipeline.status(project, "nothing")
    with pytest.raises(pipeline.PipelineError, match="cannot commit prepare"):  # its output is missing
        pipeline.commit(project, "prepare")
    (project / "dvc.yaml").unlink()
    assert not pipeline.is_current(project, "prepare")
    assert not pipeline.commit(project, "prepare")
    assert not pipeline.restore(project, "prepare")


def test_init_is_idempotent_and_quiet(project: Path) -> None:
    settings = (project / ".dvc" / "config").read_text()
    assert "analytics = False" in settings
    assert "check_update = False" in settings
    ignored = (project / ".dvcignore").read_text()
    assert pipeline.init(project) == "present"
    assert (project / ".dvc" / "config").read_text() == settings
    assert (project / ".dvcignore").read_text() == ignored
    assert "/.comlrl/" in ignored.splitlines()


def test_a_project_copied_without_git_goes_on(project: Path, tmp_path: Path) -> None:
    run_all(project)
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git"))
    if (project / ".git").exists():
        with pytest.raises(pipeline.PipelineError, match="git"):
            pipeline.is_current(copy, "prepare")
    pipeline.init(copy)
    pipeline.init(copy)
    assert all(pipeline.is_current(copy, name) for name in STAGES)


def test_a_folder_that_git_ignores_is_kept_without_git(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("project/\n")
    (tmp_path / "project").mkdir()
    assert pipeline.init(tmp_path / "project") == "no-scm"
    assert "kept without git" in caplog.text
