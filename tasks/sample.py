"""Sample: which pairs, of this iteration and of earlier ones, the update learns from."""

import logging
from pathlib import Path

from prefect import task

from comlrl_core.files import write_jsonl
from comlrl_core.preference.iteration import draw_pairs
from comlrl_core.preference.records import to_json
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.steps import steps_of

logger = logging.getLogger("comlrl_core.stages")


@task(name="sample", **OPTIONS)
def sample(job: Job, iteration: int) -> Path:
    """Draw the training pairs of `iteration` from the files that its predecessor's manifest lists, and its
    own.
    """
    target = steps_of(job, iteration).drawn
    if target.is_file():
        return target
    eligible = job.store.manifest(iteration - 1).eligible()
    drawn = draw_pairs(job.store.replay, iteration, eligible, job.preference)
    write_jsonl(target, (to_json(record) for record in drawn.records))
    logger.info(
        "iteration %d: %d pairs to learn from (%s)",
        iteration,
        len(drawn.records),
        ", ".join(f"{count} of iteration {number}" for number, count in drawn.counts.items() if count) or "none",
    )
    return target
