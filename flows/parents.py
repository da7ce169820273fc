"""A stage ends with the `dvc` that started it.

`dvc` killed outright leaves its stage running; started again, it would begin a second copy beside the first. Every step
is written whole or not at all, so a stage may simply stop when it sees that its `dvc` is gone: the next start goes on
after the last finished step.
"""

import os
import sys
import threading
import time

import psutil

POLL_SECONDS = 0.3
EXIT_CODE = 130


def end_with_dvc() -> None:
    """Watch the `dvc` process among this one's ancestors, if there is one, and end when it is gone."""
    dvc = dvc_ancestor()
    if dvc is not None:
        threading.Thread(target=_watch, args=(dvc,), daemon=True, name="end-with-dvc").start()


def dvc_ancestor() -> psutil.Process | None:
    """The nearest ancestor that runs DVC; None where a person or another program started this process."""
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return None
    return next((parent for parent in parents if _runs_dvc(parent)), None)


def _runs_dvc(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]
    except psutil.Error:
        return False
    return any(os.path.basename(word) in ("dvc", "dvc.exe") for word in words) and "comlrl" not in words


def _watch(dvc: psutil.Process) -> None:
    while _lives(dvc):
        time.sleep(POLL_SECONDS)
    print("dvc is gone: this stage stops; finished steps are kept", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
