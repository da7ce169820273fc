import os
import socket
import sys
from pathlib import Path

import pytest

from flows import doctor
from flows.doctor import PACKAGES, examine
from flows.package_lock import LOCK_NAME, write_lock
from flows.pipeline import init
from flows.project import Project


@pytest.fixture
def healthy(small_project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    write_lock(small_project.work_root)
    return small_project


def test_a_healthy_project(healthy: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(healthy) == 0
    out = capsys.readouterr().out
    assert "no problems found" in out and "PROBLEM" not in out
    assert str(healthy.work_root) in out and sys.executable in out
    assert all(name in out for name in PACKAGES)
    assert "2 iterations" in out and "not kept by DVC" in out


def test_who_is_writing_and_which_ports_are_taken(
    healthy: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        ports = taken.getsockname()[1], free.getsockname()[1]
        monkeypatch.setattr(doctor, "PREFECT_PORT", ports[0])
        monkeypatch.setattr(doctor, "MLFLOW_PORT", ports[1])
        examine(healthy)
        out = capsys.readouterr().out
        assert "lock          free" in out and f"{ports[0]} in use, {ports[1]} free" in out
    with healthy.run_lock("run"):
        examine(healthy)
    assert f"in use by process {os.getpid()} (comlrl run" in capsys.readouterr().out


def test_looking_changes_nothing(healthy: Project) -> None:
    before = {str(p): p.stat().st_mtime_ns for p in healthy.work_root.rglob("*")}
    examine(healthy)
    assert {str(p): p.stat().st_mtime_ns for p in healthy.work_root.rglob("*")} == before


def test_problems_are_counted_and_named(
    healthy: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = healthy.params.read_text()
    healthy.params.write_text(text.replace("function: builtin:length_ratio", "function: missing.py:score"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine(healthy) == 2
    out = capsys.readouterr().out
    assert "missing.py" in out and "no comlrl command" in out and "2 problem(s)" in out


def test_settings_that_are_refused(healthy: Project, capsys: pytest.CaptureFixture[str]) -> None:
    healthy.params.write_text(healthy.params.read_text().replace("temperature: 1.0", "temperature: -1.0"))
    assert examine(healthy) == 1
    assert "training.temperature" in capsys.readouterr().out


def test_another_environments_command(
    healthy: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bare `dvc repro` would run the stages with it."""
    other = tmp_path / "bin" / "comlrl"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert examine(healthy) == 1
    assert f"{other}, which belongs to another environment" in capsys.readouterr().out


def test_a_pipeline_of_other_code(
    healthy: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    init(healthy.work_root)
    assert examine(healthy) == 0
    (healthy.work_root / LOCK_NAME).write_text("{}")
    assert examine(healthy) == 1
    out = capsys.readouterr().out
    assert "comlrl init" in out and "DVC repository" in out


def test_a_server_that_does_not_answer(
    healthy: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examine(healthy)
    assert "none running" in capsys.readouterr().out
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    examine(healthy)
    assert "http://127.0.0.1:1/api does not answer" in capsys.readouterr().out
