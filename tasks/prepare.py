"""Prepare: the task files and the initial team."""

import logging
from typing import Any

from prefect import task

from comlrl_core.environments.sets import task_sets
from comlrl_core.environments.tasks import write_tasks
from comlrl_core.errors import ComlrlError
from comlrl_core.files import write_json
from comlrl_core.publishing import publish_policy
from comlrl_core.store import PROGRESS, initial_manifest, whole_folder
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.loading import initial_team, policy, settle
from tasks.steps import inputs_digest

logger = logging.getLogger("comlrl_core.stages")


@task(name="prepare", **OPTIONS)
def prepare(job: Job) -> dict[str, Any]:
    """Write `data/tasks/{train,eval}.jsonl`, `models/iteration_0000` and `state/iteration_0000`.

    Returns the number of tasks of each kind.
    """
    settle(job)
    tasks = job.config.tasks
    train, evaluation = task_sets(tasks.train, tasks.eval, tasks.num_train, tasks.num_eval, tasks.seed, job.source_root)
    write_tasks(job.train_tasks, train)
    write_tasks(job.eval_tasks, evaluation)
    if not _team_is_there(job):
        team = initial_team(job)
        with whole_folder(job.store.training_state(0)) as state:
            write_json(state / PROGRESS, {"iteration": 0, "environment_steps": 0}, indent=2)
        publish_policy(job.store.policy(0), team, initial_manifest(inputs_digest(job, 0)))
    logger.info("prepared %d training tasks and %d held-out tasks", len(train), len(evaluation))
    return {"train": len(train), "eval": len(evaluation)}


def _team_is_there(job: Job) -> bool:
    """Whether an interrupted call has written the initial team of these very settings, and it is sound."""
    if not job.store.has(0) or not (job.store.training_state(0) / PROGRESS).is_file():
        return False
    try:
        manifest = job.store.manifest(0)
        return manifest.inputs == inputs_digest(job, 0) and policy(job, 0).fingerprint() == manifest.policy
    except ComlrlError:
        return False
