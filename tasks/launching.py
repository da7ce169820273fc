"""Stages on several processes: `torchrun` (or DeepSpeed's launcher) as a child, and nothing left behind.

    stage in the flow's process                     ranks, one process each
    writes call.json (job, stage, arguments) -----> tasks.ranks reads it and runs the same stage
    forwards their lines, live             <------- print and log
    reads result.json, or raises what      <------- the first process writes the result; each one that fails, why
    failed first

Ranks end by themselves when the process that started them is gone; the launcher ends them in every other case.
"""

import contextvars
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import psutil

from comlrl_core import errors
from comlrl_core.config.engine import EngineSettings
from comlrl_core.errors import ComlrlError, TrainingError
from comlrl_core.files import read_json, write_json
from tasks.job import Job

logger = logging.getLogger("comlrl_core.stages")

Arguments = ParamSpec("Arguments")

MARK = "COMLRL_RANKS"  # in the environment of ranks: the folder of their call
CALL, RESULT = "call.json", "result.json"
GRACE = 5.0  # seconds between being asked to end and being ended
POLL = 0.2
PROGRESS_SECONDS = 10
_DIED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_numbers = count()


def launched(
    stage: Callable[Concatenate[Job, Arguments], Path],
) -> Callable[Concatenate[Job, Arguments], Path]:
    """Run `stage` on as many processes as its job's engine has; in this process where that is one.

    The stage is called in every one of them with equal arguments; the first one's result is returned.
    """

    @wraps(stage)
    def run(job: Job, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Path:
        if not job.config.engine.is_launched() or in_rank():
            return stage(job, *args, **kwargs)
        return launch(job, f"{stage.__module__}:{stage.__name__}", args)

    return run


def in_rank() -> bool:
    """Whether this process is one of several that the launcher started."""
    return MARK in os.environ


def launch(job: Job, stage: str, args: Sequence[Any] = ()) -> Path:
    """Run `stage` (`module:function`) of `job` on several processes, and return the path that it returns.

    Raises:
        ComlrlError: as the first process that failed raised it; `TrainingError` for any other error (its traceback is
            in the log), for a process that was killed, and after `engine.stage_timeout`.
    """
    engine = job.config.engine
    end_leftovers(job)
    folder = _calls(job) / f"{stage.partition(':')[2]}-{os.getpid()}-{next(_numbers)}"
    folder.mkdir(parents=True)
    write_json(folder / CALL, {"job": job.model_dump(mode="json"), "stage": stage, "args": list(args)})
    if engine.num_nodes > 1 and not engine.hostfile:
        logger.info("to be started on each of the other machines, now: %s", shlex.join(command(engine, folder)))
    try:
        with _running(command(engine, folder), _environment(job, folder)) as (process, said):
            code = _wait(process, folder, engine.stage_timeout)
        result = folder / RESULT
        if code == 0 and result.is_file():
            return Path(read_json(result)["path"])
        raise _failure(folder, said, code)
    finally:
        _remove(folder)


def command(engine: EngineSettings, folder: Path) -> list[str]:
    """The command line that starts the ranks of the call in `folder`."""
    if engine.hostfile:
        # The addresses and the way to them are DeepSpeed's affair.
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", engine.hostfile]
        return [*launcher, "--no_local_rank", "--module", "tasks.ranks", str(folder)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(engine.nproc)]
    if engine.rendezvous:
        launcher += ["--nnodes", str(engine.num_nodes), "--rdzv-backend", "c10d", "--rdzv-id", RENDEZVOUS]
        launcher += ["--rdzv-endpoint", engine.rendezvous]
    else:
        launcher.append("--standalone")  # on a free port
    return [*launcher, "--module", "tasks.ranks", str(folder)]


RENDEZVOUS = "comlrl"


def end_leftovers(job: Job) -> None:
    """End ranks that a killed run left behind (they end by themselves, unless they were stopped), and their files."""
    for folder in _calls(job).glob("*-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and int(owner) != os.getpid() and not psutil.pid_exists(int(owner)):
            _end(_ranks(folder))
            _remove(folder)


def _calls(job: Job) -> Path:
    return job.scratch.parent / "ranks"


def _environment(job: Job, folder: Path) -> dict[str, str]:
    threads = str(job.config.training.num_threads or 1)  # every process has as many
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        MARK: str(folder),
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no second port that another launch might take
        "TQDM_MININTERVAL": str(PROGRESS_SECONDS),  # a bar's states come as lines
    }


@contextmanager
def _running(words: list[str], environment: dict[str, str]) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """The launcher and what it has said; when the block ends, however it ends, so have the launcher and its ranks."""
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us, and we end them
    )
    said: list[str] = []
    here = contextvars.copy_context()  # in it Prefect knows which run a line belongs to
    reader = threading.Thread(target=here.run, args=(_forward, process, said), daemon=True, name="rank-lines")
    reader.start()
    folder = Path(environment[MARK])
    try:
        yield process, said
    finally:
        known = _family(process.pid) + _ranks(folder)
        with suppress(ProcessLookupError):
            process.terminate()
        _end([*known, *_ranks(folder)])
        process.wait()
        reader.join(GRACE)


def _forward(process: "subprocess.Popen[str]", said: list[str]) -> None:
    """Every line of the ranks into this run's log, as it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.rstrip()
        said.append(text)
        if text.startswith("[rank "):
            logger.info("%s", text)
        elif text:
            logger.debug("%s", text)  # torchrun's and libraries' own; those of a failed launch are shown with it


def _wait(process: "subprocess.Popen[str]", folder: Path, limit: float | None) -> int:
    """The launcher's exit code. A rank that is gone without a word ends the wait, whatever the launcher does."""
    end = None if limit is None else time.monotonic() + limit
    while (code := process.poll()) is None:
        if end is not None and time.monotonic() > end:
            raise TrainingError(
                f"the stage's processes were ended after engine.stage_timeout, {limit:g} s; finished steps are kept"
            )
        time.sleep(POLL)
    return code


def _failure(folder: Path, said: Sequence[str], code: int) -> ComlrlError:
    """What went wrong first: a process that was killed, else the earliest error of a rank."""
    killed = [found for line in said if (found := _DIED.search(line)) and int(found[1]) < 0]
    own = sorted((read_json(path) for path in folder.glob("error_*.json")), key=lambda error: error["time"])
    first = next((error for error in own if not error["follows"]), None)
    if killed and first is None:
        number, rank, pid = killed[0].groups()
        return TrainingError(
            f"training process {rank} (pid {pid}) was killed by signal {-int(number)}: by the system, where memory ran "
            "out, or by a person; finished steps are kept, the same command goes on"
        )
    first = first or (own[0] if own else None)
    if first is None:
        for line in said[-40:]:
            logger.error("%s", line)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return TrainingError(f"the processes of the stage ended with {how} without saying why; finished steps are kept")
    kind = getattr(errors, first["type"], None)
    if isinstance(kind, type) and issubclass(kind, ComlrlError):
        return kind(first["message"])
    logger.error("process %d failed first:\n%s", first["rank"], first["traceback"])
    return TrainingError(f"process {first['rank']} failed first: {first['type']}: {first['message']}")


def _ranks(folder: Path) -> list[psutil.Process]:
    """The processes that have written themselves down in `folder` and live."""
    found = []
    for path in folder.glob("rank_*.json"):
        with suppress(psutil.Error, OSError, ValueError, KeyError):
            entry = json.loads(path.read_text(encoding="utf-8"))
            process = psutil.Process(entry["pid"])
            if abs(process.create_time() - entry["created"]) < 1.0:
                found.append(process)
    return found


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _end(processes: Sequence[psutil.Process]) -> None:
    """Ask them to end; end those that are left after a while."""
    for process in processes:
        with suppress(psutil.Error):
            process.resume()  # a stopped process hears nothing
            process.terminate()
    _, left = psutil.wait_procs(list(processes), timeout=GRACE)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
