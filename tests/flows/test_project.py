import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError
from flows.project import Project, ProjectBusy

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from flows.project import Project
with Project.at(Path(sys.argv[1])).run_lock("run", children=len(sys.argv) > 2):
    print("held", flush=True)
    if len(sys.argv) > 2:
        import subprocess
        done = subprocess.run([sys.executable, *sys.argv[2:]], capture_output=True, text=True)
        print(done.stdout.strip(), flush=True)
    sys.stdin.readline()
"""
TAKE = """
import sys
from pathlib import Path
from flows.project import Project, ProjectBusy
try:
    with Project.at(Path(sys.argv[1])).run_lock("stage iterate"):
        print("taken")
except ProjectBusy as error:
    print("busy")
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("COMLRL_HOME", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "params.yaml").write_text("seed: 1\n")
    return folder


def hold(work: Path, *child: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(work), *child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_find_walks_up_to_the_nearest_params_file(work: Path) -> None:
    below = work / "a" / "b"
    below.mkdir(parents=True)
    assert Project.find(below).work_root == work
    (work / "a" / "params.yaml").write_text("")
    assert Project.find(below).work_root == work / "a"
    assert Project.find(params=work / "params.yaml").work_root == work


def test_no_project_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comlrl init"):
        Project.find(tmp_path)
    with pytest.raises(ConfigError, match=r"other\.yaml does not exist"):
        Project.find(params=tmp_path / "other.yaml")


def test_an_experiment_in_a_copy_shares_only_the_state_root(work: Path, tmp_path: Path, monkeypatch) -> None:
    """`dvc exp run --temp` runs in a copy and names the original in DVC_ROOT."""
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "params.yaml").write_text("")
    monkeypatch.setenv("DVC_ROOT", str(work))
    project = Project.find(copy)
    assert project.state_root == work / ".comlrl"
    assert project.train_tasks == copy / "data" / "tasks" / "train.jsonl"
    assert project.scratch.is_relative_to(copy)
    assert project.lock_file.is_relative_to(copy)
    monkeypatch.setenv("COMLRL_HOME", str(tmp_path / "home"))
    assert Project.find(copy).state_root == tmp_path / "home" / ".comlrl"


def test_a_second_writer_is_told_who_holds_the_project(work: Path) -> None:
    holder = hold(work)
    with (
        pytest.raises(ProjectBusy, match=rf"process {holder.pid} \(comlrl run, since 20"),
        Project.at(work).run_lock("x"),
    ):
        pass
    holder.communicate("\n")
    with Project.at(work).run_lock("run"):
        assert (work / ".comlrl" / "run.json").is_file()
    assert not (work / ".comlrl" / "run.json").exists()


def test_the_lock_of_a_killed_process_is_free(work: Path) -> None:
    holder = hold(work)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (work / ".comlrl" / "run.json").is_file()  # its name is still there
    with Project.at(work).run_lock("run"):
        pass


def test_a_second_writer_is_refused_before_slow_preparations(work: Path) -> None:
    """Without a lock of its own and without a trace; the name that a killed process left behind stops nobody."""
    Project.at(work).refuse_if_busy()
    assert not (work / ".comlrl").exists()
    holder = hold(work)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    with pytest.raises(ProjectBusy, match=rf"process {holder.pid} \(comlrl run, since 20"):
        Project.at(work).refuse_if_busy()
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    holder.kill()
    holder.wait()
    assert (work / ".comlrl" / "run.json").is_file()
    Project.at(work).refuse_if_busy()


def test_a_second_lock_of_the_same_process_is_refused(work: Path) -> None:
    project = Project.at(work)
    with (
        project.run_lock("run"),
        pytest.raises(ProjectBusy, match=rf"process {os.getpid()}"),
        project.run_lock("stage"),
    ):
        pass
    with project.run_lock("run"):
        pass


def test_an_exception_frees_the_lock(work: Path) -> None:
    project = Project.at(work)
    with pytest.raises(KeyError), project.run_lock("run"):
        raise KeyError
    with project.run_lock("run"):
        pass


@pytest.mark.parametrize("children", [True, False])
def test_only_the_children_of_a_holder_that_allows_it_may_write(work: Path, children: bool) -> None:
    if children:
        holder = hold(work, "-c", TAKE, str(work))
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(ProjectBusy), Project.at(work).run_lock("run"):  # no child of it
            pass
        holder.communicate("\n")
    else:
        with Project.at(work).run_lock("run"):
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run([sys.executable, "-c", TAKE, work], capture_output=True, text=True, env=environment)
        assert done.stdout == "busy\n"


def test_waiting_for_the_lock_takes_no_time(work: Path) -> None:
    holder = hold(work)
    start = time.monotonic()
    with pytest.raises(ProjectBusy), Project.at(work).run_lock("run"):
        pass
    assert time.monotonic() - start < 1.0
    holder.communicate("\n")
