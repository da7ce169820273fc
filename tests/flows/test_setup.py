import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.files import read_params, read_yaml
from comlrl_core.config.run import RunConfig
from flows import setup
from flows.package_lock import LOCK_NAME, check_lock
from flows.project import Project, ProjectBusy
from flows.setup import bring_up_to_date, initialise, reproduce


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, own_environment: None) -> list[Path]:
    """Without MLflow's database, which takes seconds; the folders for which one was asked."""
    asked: list[Path] = []
    monkeypatch.setattr(setup, "ensure_database", asked.append)
    return asked


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "tmp" not in p.parts[len(folder.parts) :]
    }


def test_a_project_is_made_from_nothing(tmp_path: Path, quick: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "project"
    initialise(folder)
    assert {"params.yaml", "dvc.yaml", "my_rewards.py", ".gitignore", ".dvcignore", LOCK_NAME} <= files(folder).keys()
    assert check_lock(folder) is None
    assert quick == [folder / ".comlrl"]
    assert "next: comlrl run" in capsys.readouterr().out


def test_making_it_again_changes_nothing(tmp_path: Path, quick: list[Path]) -> None:
    initialise(tmp_path)
    mine = (tmp_path / "params.yaml").read_text() + "# mine\n"
    (tmp_path / "params.yaml").write_text(mine)
    before = files(tmp_path)
    initialise(tmp_path)
    assert files(tmp_path) == before


def test_the_templates_are_valid_and_are_what_this_repository_uses() -> None:
    templates = Path(setup.__file__).parent / "templates"
    config = read_params(templates / "params.yaml").run_config()
    assert isinstance(config, RunConfig)
    assert set(setup.TEMPLATES) == {path.name for path in templates.iterdir() if path.is_file()}
    root = Path(setup.__file__).parents[1]
    assert read_params(root / "params.yaml").run_config() == config
    assert (root / "dvc.yaml").read_text() == (templates / "pipeline.yaml").read_text()


def test_the_settings_have_every_name_that_the_pipeline_uses() -> None:
    """DVC refuses the whole pipeline for one missing name, also of a stage that the algorithm does not have."""
    templates = Path(setup.__file__).parent / "templates"
    text = (templates / "pipeline.yaml").read_text()
    names = set(re.findall(r"\$\{(\w+)\}", text)) - {"key"}
    assert {"iterations", "last_iteration"} <= names <= read_yaml(templates / "params.yaml").keys()


def test_the_lock_file_and_dependencies_follow_the_settings(small_project: Project) -> None:
    params = small_project.params
    params.write_text(params.read_text().replace("builtin:length_ratio # or", "my_rewards.py:many_vowels # or"))
    bring_up_to_date(small_project)
    assert check_lock(small_project.work_root) is None
    assert small_project.dvc_yaml.read_text().count("- my_rewards.py") == 2


def test_repro_runs_this_interpreters_dvc_and_holds_the_project(
    small_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        seen.update(command=command, **options)
        with pytest.raises(ProjectBusy, match="comlrl repro"), small_project.run_lock("run"):
            pass
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    assert reproduce(small_project, ["--dry", "evaluate"]) == 7
    assert seen["command"][:4] == [sys.executable, "-m", "dvc", "repro"]
    assert seen["command"][-2:] == ["--dry", "evaluate"]
    assert seen["cwd"] == small_project.work_root
    assert seen["env"]["PATH"].split(os.pathsep)[0] == str(Path(sys.prefix) / "bin")
    with small_project.run_lock("run"):
        pass  # it is free again
