"""How long the stages take: one line per finished stage in `.comlrl/timings.jsonl`.

This is state, never an output of the pipeline: seconds differ from run to run, outputs must not.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_core.digests import digest_values
from tasks.job import Job, training_key

logger = logging.getLogger(__name__)

FILE = "timings.jsonl"
WORK_DIGITS = 12


@dataclass(frozen=True)
class Timing:
    """One finished call of a stage; `iteration` is None for stages that look at the whole run."""

    iteration: int | None
    stage: str
    seconds: float


def timings_path(job: Job) -> Path:
    """Where the seconds of this job's stages are kept."""
    return job.scratch.parent / FILE


@contextmanager
def timed(job: Job, stage: str, iteration: int | None) -> Iterator[None]:
    """Note how long the block took. A block that fails is not noted; a note that fails stops nothing."""
    start = time.perf_counter()
    yield
    seconds = round(time.perf_counter() - start, 3)
    entry = {"iteration": iteration, "stage": stage, "seconds": seconds, "work": _work(job)}
    path = timings_path(job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        logger.warning("the seconds of stage %s are not noted in %s: %s", stage, path, error)


def read_timings(job: Job) -> list[Timing]:
    """Finished stages, oldest first; of an iteration that was made anew with other settings or code, the newer ones.

    A stage that ran several times (chunks, an interrupted iteration, a forced repetition) stands there as often.
    """
    try:
        lines = timings_path(job).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = [entry for entry in map(_entry, lines) if entry is not None]
    newest = {_place(timing): work for timing, work in found}
    return [timing for timing, work in found if work == newest[_place(timing)]]


def _place(timing: Timing) -> int | str:
    """What is made anew as a whole: an iteration, or a stage of the whole run."""
    return timing.stage if timing.iteration is None else timing.iteration


def _entry(line: str) -> tuple[Timing, str] | None:
    """A line's timing and the work that it belongs to; None for a line that a killed process left half written."""
    try:
        entry: Any = json.loads(line)
        iteration = entry["iteration"]
        timing = Timing(None if iteration is None else int(iteration), str(entry["stage"]), float(entry["seconds"]))
        return timing, str(entry["work"])
    except (ValueError, TypeError, KeyError):
        return None


def _work(job: Job) -> str:
    """Names the settings and the code whose seconds belong together."""
    return digest_values("timing", training_key(job.config), job.code)[:WORK_DIGITS]
