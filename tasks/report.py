"""Report: one page about a run, readable without this program, and the same pictures as files.

It is made from what is there: `plots/*.csv`, the iteration files with their meta files, and the noted seconds. No model
is loaded, and a part that is missing is said to be missing. Nothing in it names a time, a host or a folder.
"""

import logging
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from prefect import task

from comlrl_core.errors import DataError
from comlrl_core.files import atomic_write_text
from comlrl_core.preference.files import iteration_path, meta_path, read_iteration, read_meta
from comlrl_core.preference.iteration import collection_metrics
from comlrl_core.preference.records import PairRecord
from tasks.calling import OPTIONS
from tasks.evaluate import read_curve
from tasks.job import Job
from tasks.reward_model import reward_model_metrics
from tasks.timing import read_timings
from tasks.update import update_metrics

logger = logging.getLogger("comlrl_core.stages")

NAME = "report.html"
TIME_PICTURE = "seconds"
PACKAGES = ("comlrl", "torch", "transformers", "datasets", "numpy", "prefect", "dvc", "mlflow", "matplotlib")
PAIRS_OF_FIRST, PAIRS_OF_LAST = 2, 4  # how many sample pairs are shown

Row = dict[str, float]


@task(name="report", **OPTIONS)
def report(job: Job) -> Path:
    """Write `report.html` and the pictures (`picture_paths`); returns the page's path."""
    from tasks.report_page import Facts, render  # matplotlib is imported with them, once a run ends
    from tasks.report_pictures import Numbers, draw

    last = job.config.num_iterations
    numbers = Numbers(
        evaluation=[row for row in read_curve(job.plots / "evaluation.csv") if row["iteration"] <= last],
        collection=collection_rows(job),
        updates=update_rows(job),
        timings=[timing for timing in read_timings(job) if (timing.iteration or 0) <= last],
        confidence=job.config.evaluation.confidence,
    )
    pictures = draw(numbers)
    for picture in pictures:
        atomic_write_text(_picture_path(job, picture.name), picture.svg)
    page = render(
        Facts(
            config=job.config,
            key=job.key(),
            numbers=numbers,
            pictures=pictures,
            samples=sample_pairs(job, [int(row["iteration"]) for row in numbers.collection]),
            versions={**versions(), "code": job.code[:16]},
        )
    )
    target = report_path(job)
    atomic_write_text(target, page)
    logger.info("the report of this run: %s", target)
    return target


def report_path(job: Job) -> Path:
    """Where the page lies."""
    return job.work_root / NAME


def picture_paths(job: Job) -> list[Path]:
    """The files of all pictures that a report has written."""
    from tasks.report_pictures import CHARTS

    return [path for name in CHARTS if (path := _picture_path(job, name)).is_file()]


def _picture_path(job: Job, name: str) -> Path:
    """Below `plots/`; but seconds differ from run to run, so their picture is state and no output of the pipeline."""
    return (job.scratch.parent if name == TIME_PICTURE else job.plots) / f"{name}.svg"


def collection_rows(job: Job) -> list[Row]:
    """What the meta files say about each collection, like the rows of `plots/collection.csv`; those where files are
    gone.
    """
    rows = {int(row["iteration"]): row for row in read_curve(job.plots / "collection.csv")}
    for iteration in range(1, job.config.num_iterations + 1):
        if not meta_path(job.store.replay, iteration).is_file():
            continue
        try:
            found = collection_metrics(read_meta(job.store.replay, iteration)) | reward_model_metrics(job, iteration)
        except DataError as error:
            logger.warning("the report leaves out a collection: %s", error)
            continue
        rows[iteration] = {"iteration": iteration, **{name.replace("/", "_"): value for name, value in found.items()}}
    return [rows[iteration] for iteration in sorted(rows) if iteration <= job.config.num_iterations]


def update_rows(job: Job) -> list[Row]:
    """The metrics of every optimizer step, oldest first; of `plots/training.csv` where training states are gone."""
    written: dict[int, list[Row]] = {}
    for row in read_curve(job.plots / "training.csv"):
        written.setdefault(int(row["iteration"]), []).append(row)
    rows: list[Row] = []
    for iteration in range(1, job.config.num_iterations + 1):
        found = update_metrics(job, iteration)
        rows += [
            {name: float(value) for name, value in row.items() if isinstance(value, int | float)} for row in found
        ] or written.get(iteration, [])
    return rows


def sample_pairs(job: Job, iterations: Sequence[int]) -> list[tuple[int, PairRecord]]:
    """Some pairs of the first and of the last iteration that has any, evenly taken from each file."""
    first = _first_with_pairs(job, iterations)
    last = _first_with_pairs(job, [iteration for iteration in reversed(iterations)])
    if first is None or last is None:
        return []
    if first[0] == last[0]:
        return _evenly(first, PAIRS_OF_FIRST + PAIRS_OF_LAST)
    return _evenly(first, PAIRS_OF_FIRST) + _evenly(last, PAIRS_OF_LAST)


def _first_with_pairs(job: Job, iterations: Sequence[int]) -> tuple[int, list[PairRecord]] | None:
    for iteration in iterations:
        path = iteration_path(job.store.replay, iteration)
        try:
            records = read_iteration(path) if path.is_file() else []
        except DataError as error:
            logger.warning("the report leaves out pairs: %s", error)
            continue
        if records:
            return iteration, records
    return None


def _evenly(of_iteration: tuple[int, list[PairRecord]], count: int) -> list[tuple[int, PairRecord]]:
    iteration, records = of_iteration
    count = min(count, len(records))
    return [(iteration, records[place * len(records) // count]) for place in range(count)]


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
