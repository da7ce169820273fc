"""A disk that runs full in any stage: a clear error, exit code 2, older files whole, and the run goes on with space.

The project lies on a small file system of its own; a ballast file takes all of it just before a stage works. Needs the
right to mount one.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc.dvcfile import ProjectFile

from flows import cli, iteration, pipeline, training
from flows.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.endurance]

SIZE = "48m"
BLOCK = 4096
BALLAST = "ballast"
OUTPUTS = ("data", "replay", "models", "state", "plots")
RECORDS = ("params.yaml", "dvc.yaml", "dvc.lock", "comlrl.lock", "metrics.json")
SAID = "the disk is full"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of `SIZE`; it is gone afterwards, whatever happened."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "comlrl-test", str(place)]
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a small file system")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield place
    finally:
        os.chdir(tmp_path)
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def undisturbed_tree() -> dict[str, dict[str, bytes]]:
    """Where the first test that needs them leaves the outputs of a run that nothing disturbed."""
    return {}


@pytest.fixture
def project(small_project: Project, small_disk: Path) -> Project:
    """A small project that DVC keeps, on the small disk."""
    root = small_disk / "project"
    shutil.copytree(small_project.work_root, root)
    pipeline.init(root)
    return Project.at(root)


@pytest.fixture
def comlrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`comlrl run --plain` in a folder: exit code and stderr."""

    def command(folder: Path) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["comlrl", "run", "--plain"])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, capsys.readouterr().err

    return command


@pytest.fixture
def undisturbed(
    small_project: Project,
    comlrl: Callable[..., tuple[int, str]],
    undisturbed_tree: dict[str, dict[str, bytes]],
) -> dict[str, bytes]:
    if not undisturbed_tree:
        pipeline.init(small_project.work_root)
        code, err = comlrl(small_project.work_root)
        assert code == 0, err
        undisturbed_tree["outputs"] = outputs(small_project.work_root)
    return undisturbed_tree["outputs"]


def outputs(root: Path) -> dict[str, bytes]:
    """What DVC keeps, and its record of it."""
    paths = [path for name in OUTPUTS for path in (root / name).rglob("*") if path.is_file()]
    paths += [root / name for name in RECORDS if (root / name).is_file()]
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    if "dvc.lock" in found:  # the page says where it was made, and how long it took
        found["dvc.lock"] = re.sub(rb"- path: report.html\n.*\n.*\n.*\n", b"", found["dvc.lock"])
    return found


def fill(disk: Path) -> None:
    """Leave not one block."""
    with (disk / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, BLOCK, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


class Full:
    """Fills the disk once, before the named stage works; keeps what was there then."""

    def __init__(self, disk: Path, root: Path, stage: str, number: int) -> None:
        self.disk, self.root, self.stage, self.number = disk, root, stage, number
        self.before: dict[str, bytes] | None = None

    def reached(self, stage: str, number: int) -> None:
        if self.before is None and (stage, number) == (self.stage, self.number):
            self.before = outputs(self.root)
            fill(self.disk)


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("prepare", 0),
        ("collect", 2),
        ("score", 2),
        ("pair", 2),
        ("sample", 2),
        ("update", 2),
        ("evaluate", 2),
        ("report", 0),
        ("commit prepare", 0),
        ("commit iterate@0002", 0),
        ("commit evaluate", 0),
        ("record", 3),
    ],
)
def test_a_disk_that_runs_full(
    project: Project,
    small_disk: Path,
    comlrl: Callable[..., tuple[int, str]],
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    number: int,
) -> None:
    full = Full(small_disk, project.work_root, stage, number)
    call, commit, dump = training.call, pipeline.commit, ProjectFile.dump_stages
    dumped: list[str] = []

    def called(step: Any, *args: Any) -> Any:
        full.reached(step.name, args[1] if len(args) > 1 else 0)
        return call(step, *args)

    def committed(root: Path, name: str, **options: Any) -> bool:
        full.reached(f"commit {name}", 0)
        return commit(root, name, **options)

    def recorded(file: Any, stages: Any, **options: Any) -> None:
        dumped.append(stages[0].addressing)
        full.reached("record", len(dumped))
        dump(file, stages, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ProjectFile, "dump_stages", recorded)
        patched.setattr(training, "call", called)
        patched.setattr(iteration, "call", called)
        patched.setattr(pipeline, "commit", committed)
        code, err = comlrl(project.work_root)
    assert full.before is not None, "the stage was not reached"
    assert code == 2 and SAID in err and "Traceback" not in err, err
    after = outputs(project.work_root)
    assert {name for name, content in full.before.items() if after.get(name) != content} == set()
    assert not [
        path
        for path in project.work_root.rglob("*")
        if path.name.endswith((".tmp", ".partial", ".before")) and ".dvc" not in path.parts
    ]  # DVC clears its cache by itself

    assert comlrl(project.work_root)[0] == 2  # still full
    after = outputs(project.work_root)
    assert {name for name, content in full.before.items() if after.get(name) != content} == set()

    (small_disk / BALLAST).unlink()
    code, err = comlrl(project.work_root)
    assert code == 0, err
    assert outputs(project.work_root) == undisturbed


def test_a_disk_that_is_full_from_the_start(project: Project, small_disk: Path) -> None:
    before = outputs(project.work_root)
    fill(small_disk)
    command = [sys.executable, "-m", "flows.cli", "run", "--plain"]
    done = subprocess.run(command, cwd=project.work_root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2 and SAID in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert outputs(project.work_root) == before
