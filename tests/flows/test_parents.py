"""Starters are small programs with the names that real ones have; what they start imports `flows.parents` alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows import parents

ROOT = Path(__file__).parents[2]
STARTER = """#!{python}
import subprocess, sys
sys.exit(subprocess.run(["sh", "-c", "{python} {work} & wait"]).returncode)
"""
WORK = """
import os, sys, time
from flows.parents import end_with_dvc, end_with_serve
(end_with_serve if {serve} else end_with_dvc)()
open({pid!r} + ".tmp", "w").write(str(os.getpid()))
os.rename({pid!r} + ".tmp", {pid!r})
time.sleep(60)
"""


def start(folder: Path, words: list[str], mark: str, serve: bool) -> tuple["subprocess.Popen[bytes]", int]:
    """A starter that is called with `words`, and the pid of what it started once that watches."""
    pid = folder / "pid"
    (folder / "work.py").write_text(WORK.format(serve=serve, pid=str(pid)))
    program = folder / words[0]
    program.write_text(STARTER.format(python=sys.executable, work=folder / "work.py"))
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), mark: "x"}
    starter = subprocess.Popen([program, *words[1:]], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not pid.exists():
        assert time.monotonic() < deadline and starter.poll() is None
        time.sleep(0.05)
    return starter, int(pid.read_text())


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("words", "mark", "serve"),
    [
        (["dvc", "repro"], parents.STAGE_MARK, False),
        (["comlrl", "serve", "--port", "4200"], parents.RUN_MARK, True),
    ],
)
def test_a_killed_starter_leaves_its_work_running(tmp_path: Path, words: list[str], mark: str, serve: bool) -> None:
    """Killed outright, neither `dvc` nor `comlrl serve` can end what it started: that ends by itself, in seconds.

    Also where the starter was who read its lines, so that its last words meet a broken pipe.
    """
    starter, pid = start(tmp_path, words, mark, serve)
    time.sleep(3 * parents.POLL_SECONDS)
    assert not gone(pid, 0.2)
    assert starter.stderr is not None
    starter.stderr.close()
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert gone(pid, 10.0)


def test_a_starter_that_was_killed_before_anybody_watched_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the imports of a stage: its environment says that DVC started it, and no ancestor can be DVC."""
    stopped: list[str] = []
    monkeypatch.setattr(parents, "_stop", stopped.append)
    monkeypatch.setattr(parents, "_ancestor", lambda fits: None)
    monkeypatch.delenv(parents.STAGE_MARK, raising=False)
    monkeypatch.delenv(parents.RUN_MARK, raising=False)
    parents.end_with_dvc()
    parents.end_with_serve()
    assert stopped == []  # a person started it
    monkeypatch.setenv(parents.STAGE_MARK, "iterate@0001")
    parents.end_with_dvc()
    monkeypatch.setenv(parents.RUN_MARK, "an id")
    parents.end_with_serve()
    assert stopped == ["dvc", "comlrl serve"]


def test_a_program_that_uses_dvc_itself_is_no_lost_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(parents, "_stop", stopped.append)
    monkeypatch.setattr(parents.psutil.Process, "parents", lambda self: [psutil.Process()])  # this Python
    monkeypatch.setenv(parents.STAGE_MARK, "iterate@0001")
    monkeypatch.setattr(parents, "_words", lambda process: ["/usr/bin/python3", "notebook.py"])
    parents.end_with_dvc()
    assert stopped == []


@pytest.mark.parametrize(
    ("words", "dvc", "serve"),
    [
        (["/venv/bin/python", "/venv/bin/dvc", "repro"], True, False),
        (["/venv/bin/python", "-m", "dvc", "repro", "--allow-missing"], True, False),
        (["dvc", "exp", "exec-run", "--infofile", "x"], True, False),
        (["sh", "-c", 'PATH="$PATH:/home/dvc/.venv/bin" comlrl stage iterate'], False, False),
        (["/venv/bin/python", "/venv/bin/comlrl", "serve", "--port", "4200"], False, True),
        (["/venv/bin/python", "/venv/bin/comlrl", "run"], False, False),
        (["vim", "dvc.yaml"], False, False),
        ([], False, False),
    ],
)
def test_starters_are_known_by_their_command_lines(words: list[str], dvc: bool, serve: bool) -> None:
    assert parents._runs_dvc(words) is dvc
    assert parents._serves(words) is serve


def test_nobody_is_watched_where_nobody_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents.psutil.Process, "parents", lambda self: [])
    assert parents.dvc_ancestor() is None
