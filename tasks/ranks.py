"""One of several processes that run a stage together: `torchrun ... --module tasks.ranks FOLDER` (see `launching`)."""

import importlib
import io
import logging
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TextIO

import psutil

from comlrl_core.files import read_json, write_json
from tasks.launching import CALL, MARK, RESULT

WATCH_SECONDS = 0.5
ORPHANED = 130


def main() -> None:
    """Run the stage that the call names; the first process writes what it returns, any process why it failed."""
    folder = Path(sys.argv[1])
    os.environ[MARK] = str(folder)
    rank = int(os.environ.get("RANK", "0"))
    me = psutil.Process()
    _end_with(me.parents()[:2])
    write_json(folder / f"rank_{rank}.json", {"pid": me.pid, "created": me.create_time()})
    _log(rank)
    try:
        _run(folder)
    except BaseException as error:
        write_json(
            folder / f"error_{rank}.json",
            {
                "rank": rank,
                "time": time.time(),
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "follows": _follows(error),
            },
        )
        # Not an ordinary exit: that would wait for threads of collectives that nobody else will join.
        sys.stdout.flush()
        os._exit(1)


def _run(folder: Path) -> None:
    import torch

    from comlrl_core.engine import processes
    from tasks.job import Job

    call = read_json(folder / CALL)
    job = Job.model_validate(call["job"])
    torch.set_num_threads(job.config.training.num_threads or 1)
    processes.join(job.config.engine.collective_timeout)
    module, _, name = call["stage"].partition(":")
    stage = getattr(importlib.import_module(module), name)
    path = getattr(stage, "fn", stage)(job, *call["args"])
    if processes.is_first():
        write_json(folder / RESULT, {"path": str(path)})
    processes.wait_for_all()
    processes.leave()


def _follows(error: BaseException) -> bool:
    """Whether this says no more than that another process is gone."""
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


class Marked(io.TextIOBase):
    """A stream that puts a mark before every line, also before the states of a progress bar."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream, self._mark, self._rest = stream, mark, ""
        self._guard = threading.RLock()

    def write(self, text: str) -> int:
        with self._guard:
            *lines, self._rest = re.split("[\r\n]", self._rest + text)
            for line in filter(str.strip, lines):
                self._stream.write(f"{self._mark}{line.rstrip()}\n")
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _log(rank: int) -> None:
    """Lines that say whose they are; what all processes would log alike, and progress, the first says."""
    if rank > 0:
        os.environ["COMLRL_PROGRESS"] = "0"
    mark = f"[rank {rank}] "
    sys.stdout, sys.stderr = Marked(sys.stdout, mark), Marked(sys.stderr, mark)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("comlrl_core").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def _end_with(starters: list[psutil.Process]) -> None:
    """End this process when the launcher is gone, or who started it: a collective would wait on for half an hour."""

    def watch() -> None:
        while all(_lives(process) for process in starters):
            time.sleep(WATCH_SECONDS)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True, name="end-with-starter").start()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
