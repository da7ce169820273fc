"""A stage ends with the `dvc` that started it, and a served run with its `comlrl serve`.

`dvc` killed outright leaves its stage running; started again, it would begin a second copy beside the first. A killed
`comlrl serve` leaves its run to a Prefect server that is gone. Every step is written whole or not at all, so the work
may simply stop when it sees that its starter is gone: the next start goes on after the last finished step.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

POLL_SECONDS = 0.3
EXIT_CODE = 130
STAGE_MARK = "DVC_STAGE"  # in the environment of the commands that DVC runs
RUN_MARK = "PREFECT__FLOW_RUN_ID"  # in that of the runs that a served deployment starts


def end_with_dvc() -> None:
    """End this process when the `dvc` among its ancestors ends, or at once where that is gone already."""
    _end_with("dvc", dvc_ancestor(), STAGE_MARK)


def end_with_serve() -> None:
    """End this process when the `comlrl serve` among its ancestors ends, or at once where that is gone already."""
    _end_with("comlrl serve", _ancestor(_serves), RUN_MARK)


def dvc_ancestor() -> psutil.Process | None:
    """The nearest ancestor that runs DVC; None where a person or another program started this process."""
    return _ancestor(_runs_dvc)


def _end_with(name: str, starter: psutil.Process | None, mark: str) -> None:
    if starter is not None:
        threading.Thread(target=_watch, args=(name, starter), daemon=True, name="end-with-starter").start()
    elif os.environ.get(mark) and _ancestor(_may_start) is None:
        _stop(name)


def _ancestor(fits: Callable[[Sequence[str]], bool]) -> psutil.Process | None:
    """The nearest ancestor whose command line fits."""
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return None
    return next((parent for parent in parents if fits(_words(parent))), None)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _runs_dvc(words: Sequence[str]) -> bool:
    return any(os.path.basename(word) in ("dvc", "dvc.exe") for word in words[:4]) and "comlrl" not in words[:4]


def _serves(words: Sequence[str]) -> bool:
    return any(os.path.basename(word) in ("comlrl", "comlrl.exe") for word in words[:3]) and "serve" in words[1:4]


def _may_start(words: Sequence[str]) -> bool:
    """Whether this may be what started us without its usual name: a Python program can use DVC or Prefect itself."""
    return bool(words) and "python" in os.path.basename(words[0])


def _watch(name: str, starter: psutil.Process) -> None:
    while _lives(starter):
        time.sleep(POLL_SECONDS)
    _stop(name)


def _stop(name: str) -> None:
    with suppress(OSError, ValueError):  # the starter may have been who read it
        print(f"{name} is gone: its work stops here; finished steps are kept", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
