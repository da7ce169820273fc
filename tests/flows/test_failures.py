"""What a person can repair on a machine is one sentence, wherever it lies in a chain of errors."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from flows.failures import repairable
from flows.project import Project

SETPRIV = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
AS_OTHERS = [] if os.getuid() else SETPRIV if shutil.which("setpriv") else None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x", "a.json"), "the disk is full: a.json"),
        (PermissionError(errno.EACCES, "x", "b.json"), "permission denied: b.json"),
        (OSError(errno.EROFS, "x", "c.json"), "the file system is read-only: c.json"),
        (RuntimeError("database or disk is full"), "the disk is full"),
    ],
)
def test_failures_of_the_machine(error: Exception, said: str) -> None:
    assert (repairable(error) or "").startswith(f"{said}; finished steps are kept")
    outer = ValueError("outer")
    outer.__cause__ = error
    assert repairable(outer) == repairable(error)


def test_all_others() -> None:
    assert repairable(ValueError("x")) is None and repairable(OSError(errno.ENOENT, "x")) is None


@pytest.mark.skipif(AS_OTHERS is None, reason="root reads everything, and there is no setpriv to become less")
@pytest.mark.parametrize("name", ["params.yaml", "data/tasks/train.jsonl", "replay", "models"])
def test_files_that_may_not_be_read_or_written(small_project: Project, name: str) -> None:
    """Told by the first command that needs them, which changes nothing."""
    root = small_project.work_root
    path = root / name
    if path.suffix == ".jsonl":
        path.parent.mkdir(parents=True)
        path.write_text('{"prompt": "x"}\n')
        text = small_project.params.read_text()
        assert "  train: builtin:length_ratio" in text
        small_project.params.write_text(text.replace("  train: builtin:length_ratio", f"  train: {name}", 1))
    elif not path.exists():
        path.mkdir()
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    mode = path.stat().st_mode
    path.chmod(0)
    command = [*(AS_OTHERS or []), sys.executable, "-m", "flows.cli", "run", "--plain"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    finally:
        path.chmod(mode)
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(path) in done.stderr and "ermission denied" in done.stderr and "Traceback" not in done.stderr
    if path.is_file():
        left = {file: file.stat().st_mtime_ns for file in root.rglob("*") if ".comlrl" not in file.parts}
        assert left == before
