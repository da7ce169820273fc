"""Collect: both sides answer a chunk of tasks."""

import logging
from pathlib import Path

from prefect import task

from comlrl_core.algorithms.preference_learning import sampling
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.engine.processes import by_first
from comlrl_core.preference.candidates import write_candidates
from comlrl_core.preference.collection import collect as collect_answers
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.launching import launched
from tasks.loading import comparator, release_comparator, sampling_team, settle, train_tasks
from tasks.steps import steps_of

logger = logging.getLogger("comlrl_core.stages")


def num_chunks(job: Job) -> int:
    """How many chunks the training tasks make: one, or as `collection_batch_size` says."""
    size = job.preference.collection_batch_size
    count = len(train_tasks(job))
    return 1 if size is None else -(-count // size)


@task(name="collect", task_run_name="collect-{chunk}", **OPTIONS)
@launched
def collect(job: Job, iteration: int, chunk: int) -> Path:
    """Let the team and the comparator of `iteration` answer the tasks of `chunk`; returns the file of
    candidates.
    """
    target = steps_of(job, iteration).candidates(chunk)
    if target.is_file():
        logger.info("iteration %d: answers of chunk %d are there already", iteration, chunk)
        return target
    settle(job)
    training = job.preference
    tasks = train_tasks(job)
    size = training.collection_batch_size or len(tasks)
    try:
        candidates = collect_answers(
            sampling_team(job, iteration - 1),
            comparator(job, iteration),
            tasks[chunk * size : (chunk + 1) * size],
            num_candidates=training.preference_num_candidates,
            comparator_num_candidates=(
                training.comparator_num_candidates if isinstance(training, ComparatorFields) else None
            ),
            sampling=sampling(training),
            seed=training.seed,
            iteration=iteration,
            tokens_per_batch=training.tokens_per_batch,
        )
    except BaseException:
        release_comparator()
        raise
    return by_first(lambda: write_candidates(target, candidates))
