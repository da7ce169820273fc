"""Stages on several processes: results, lines, failures, kills, time-outs; whatever happens, no process is left."""

import contextvars
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from comlrl_core.config.engine import EngineSettings
from comlrl_core.errors import DataError, TrainingError
from tasks import launching
from tasks.job import Job
from tasks.launching import command, end_leftovers, launch, launched

pytestmark = pytest.mark.slow

SECONDS = 120.0
STAGES = '''
import logging, os, signal, time
from pathlib import Path
from comlrl_core.engine import processes
from comlrl_core.errors import DataError

log = logging.getLogger("comlrl_core.stages")

def meet(job, word):
    """Every process adds its word."""
    log.info("first says %s", word)
    log.warning("all say %s", word)
    print(f"printed {word}\\rand more", flush=True)
    found = processes.map_shared(lambda n: f"{word}{n} by {processes.rank()}", range(5))
    path = job.work_root / "words.txt"
    processes.by_first(lambda: path.write_text("\\n".join(found)))
    return path

def lonely(job):
    """One task for two processes, and lengths that differ."""
    found = processes.map_shared(lambda n: n, [7])
    assert found == [7] and processes.total(processes.rank() + 1.0) == 3.0
    assert processes.even_share([]) == []
    own = processes.even_share(["a", "b", "c"])
    assert len(own) == 2 and [mine for _, mine in own] == ([True, True] if processes.is_first() else [True, False])
    return job.work_root

def refuses(job):
    if processes.rank() == 1:
        raise DataError("tasks.jsonl: line 3: no prompt")
    processes.wait_for_all()
    return job.work_root

def breaks(job):
    if processes.rank() == 0:
        return {}["nothing"]
    processes.wait_for_all()
    return job.work_root

def waits(job):
    (job.work_root / f"waiting_{processes.rank()}").write_text(str(os.getpid()))
    if processes.rank() == 1:
        time.sleep(600)
    processes.wait_for_all()
    return job.work_root
'''


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """A job on two processes, whose stages are those above."""
    (tmp_path / "rank_stages.py").write_text(STAGES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))

    def make(**engine: Any) -> Job:
        values = {"engine": {"kind": "deepspeed", "nproc": 2, **engine}}
        return Job.model_validate({"source_root": tmp_path, "work_root": tmp_path, "config": values, "code": "x"})

    return make


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Any:
    yield
    assert ranks_of(tmp_path) == []
    assert not list((tmp_path / ".comlrl").rglob("call.json"))


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Launchers and ranks that work for a test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "tasks.ranks" in words and any(str(folder) in word for word in words):
            found.append(process)
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
    return found


def while_waiting(job: Job, act: Callable[[dict[int, int]], None]) -> BaseException:
    """Start `waits`, do `act` with the pids of its ranks when both are there, and return what the stage raised."""

    def do() -> None:
        files = wait_for(lambda: len(found := sorted(job.work_root.glob("waiting_*"))) == 2 and found)
        act({number: int(file.read_text()) for number, file in enumerate(files)})

    helper = threading.Thread(target=do)
    helper.start()
    with pytest.raises(TrainingError) as raised:
        launch(job, "rank_stages:waits")
    helper.join()
    return raised.value


def test_both_processes_work_and_are_heard(two: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "comlrl_core.stages"):
        path = launch(two(), "rank_stages:meet", ["tick"])
    assert path.read_text().split("\n") == [f"tick{n} by {n % 2}" for n in range(5)]
    lines = [record.getMessage() for record in caplog.records]
    assert "[rank 0] first says tick" in lines and "[rank 1] first says tick" not in lines
    for rank in (0, 1):
        assert {f"[rank {rank}] {said}" for said in ("all say tick", "printed tick", "and more")} <= set(lines)
    assert len(lines) == 7  # nothing of torchrun's, DeepSpeed's and other libraries'


def test_lines_of_ranks_belong_to_the_run_that_started_them(
    two: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """A line is logged where the stage was called from: there Prefect finds the run whose log it belongs to."""
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="none")
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(run.get())

    handler, log = Handler(), logging.getLogger("comlrl_core.stages")
    log.addHandler(handler)
    run.set("mine")
    try:
        with caplog.at_level(logging.INFO, "comlrl_core.stages"):
            launch(two(), "rank_stages:meet", ["tick"])
    finally:
        log.removeHandler(handler)
    assert found and set(found) == {"mine"}


def test_two_launches_at_once_do_not_meet(two: Callable[..., Job], tmp_path: Path) -> None:
    jobs = []
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        jobs.append(two().model_copy(update={"work_root": tmp_path / name}))
    found: dict[str, str] = {}

    def one(job: Job) -> None:
        found[job.work_root.name] = launch(job, "rank_stages:meet", [job.work_root.name]).read_text()

    both = [threading.Thread(target=one, args=(job,)) for job in jobs]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert found["left"].count("left") == 5 and found["right"].count("right") == 5


def test_a_process_without_tasks_does_not_hang(two: Callable[..., Job], tmp_path: Path) -> None:
    assert launch(two(), "rank_stages:lonely") == tmp_path


def test_the_first_failure_is_the_message(two: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    """An error that a user can repair comes back as it was raised, though another process fails in its wake."""
    with pytest.raises(DataError, match=r"^tasks\.jsonl: line 3: no prompt$"):
        launch(two(), "rank_stages:refuses")


def test_a_defect_comes_with_its_traceback(two: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match="process 0 failed first: KeyError: 'nothing'"):
        launch(two(), "rank_stages:breaks")
    assert 'return {}["nothing"]' in caplog.text


@pytest.mark.endurance
def test_a_killed_rank_is_noticed(two: Callable[..., Job]) -> None:
    start = []

    def kill(pids: dict[int, int]) -> None:
        start.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    error = while_waiting(two(), kill)
    assert time.monotonic() - start[0] < 30
    assert "was killed by signal 9" in str(error)


@pytest.mark.endurance
def test_a_killed_launcher_takes_its_ranks_along(two: Callable[..., Job]) -> None:
    def kill(pids: dict[int, int]) -> None:
        os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)

    assert "signal 9" in str(while_waiting(two(), kill))


@pytest.mark.endurance
def test_a_stage_that_takes_too_long_is_ended(two: Callable[..., Job]) -> None:
    with pytest.raises(TrainingError, match=r"ended after engine\.stage_timeout, 20 s"):
        launch(two(stage_timeout=20.0), "rank_stages:waits")


FLOW = """
import sys
from pathlib import Path
from tasks.job import Job
from tasks.launching import launch
launch(Job.model_validate_json(Path(sys.argv[1]).read_text()), "rank_stages:waits")
"""


@pytest.mark.endurance
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_flow(two: Callable[..., Job], tmp_path: Path, kind: signal.Signals) -> None:
    """Also a rank that was stopped: the next start ends it."""
    job = two()
    (tmp_path / "job.json").write_text(job.model_dump_json())
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path / "job.json")], stderr=subprocess.DEVNULL)
    files = wait_for(lambda: len(found := sorted(tmp_path.glob("waiting_*"))) == 2 and found)
    if kind == signal.SIGKILL:
        psutil.Process(int(files[1].read_text())).suspend()
    flow.send_signal(kind)
    flow.wait(30)
    if kind == signal.SIGKILL:
        assert ranks_of(tmp_path)
        end_leftovers(job)
    wait_for(lambda: ranks_of(tmp_path) == [])


def test_one_process_needs_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "launch", lambda *_: pytest.fail("nothing is to be launched"))
    values = {"engine": {"kind": "deepspeed"}}
    job = Job.model_validate({"source_root": tmp_path, "work_root": tmp_path, "config": values, "code": "x"})
    assert launched(lambda job, number: tmp_path / str(number))(job, 3) == tmp_path / "3"


def test_rendezvous_and_hostfile_are_passed_on(tmp_path: Path) -> None:
    several = EngineSettings(kind="deepspeed", nproc=4, num_nodes=2, rendezvous="node-1:29400")
    words = command(several, tmp_path)
    assert words[1:] == [
        *("-m", "torch.distributed.run", "--nproc-per-node", "4", "--nnodes", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "comlrl", "--rdzv-endpoint", "node-1:29400"),
        *("--module", "tasks.ranks", str(tmp_path)),
    ]
    words = command(EngineSettings(kind="deepspeed", nproc=4, hostfile="hosts"), tmp_path)
    assert words[1:5] == ["-m", "deepspeed.launcher.runner", "--hostfile", "hosts"]
