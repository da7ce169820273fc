"""Score: the oracle judges every joint answer of a chunk."""

import logging
from pathlib import Path

from prefect import task

from comlrl_core.preference.candidates import read_candidates, write_candidates
from comlrl_core.preference.scoring import score_candidates
from comlrl_core.progress import progress
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.reward_model import pair_oracle
from tasks.steps import steps_of

logger = logging.getLogger("comlrl_core.stages")

ORACLE_BATCH = 256  # joint answers per call of the reward function: often enough for a progress bar, few enough calls


@task(name="score", task_run_name="score-{chunk}", **OPTIONS)
def score(job: Job, iteration: int, chunk: int) -> Path:
    """Score the candidates of `chunk`; returns the file of scored candidates."""
    steps = steps_of(job, iteration)
    target = steps.scored(chunk)
    if target.is_file():
        return target
    candidates = read_candidates(steps.candidates(chunk))
    with progress("score", sum(len(task.responses) for task in candidates), "answer") as bar:
        result = score_candidates(candidates, pair_oracle(job, iteration), ORACLE_BATCH, bar.update)
    if result.counts["dropped"]:
        logger.warning("iteration %d: %d rewards were unusable and dropped", iteration, result.counts["dropped"])
    return write_candidates(target, result.candidates)
