"""Prepare: the task files and the initial team."""

import logging
from typing import Any

from prefect import task

from comlrl_core.environments.sets import task_sets
from comlrl_core.environments.tasks import write_tasks
from comlrl_core.files import write_json
from comlrl_core.publishing import publish_policy
from comlrl_core.store import PROGRESS, initial_manifest, whole_folder
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.loading import initial_team, settle
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
    team = initial_team(job)
    manifest = initial_manifest(inputs_digest(job, 0))
    with whole_folder(job.store.training_state(0)) as state:
        write_json(state / PROGRESS, {"iteration": 0, "environment_steps": 0}, indent=2)
    publish_policy(job.store.policy(0), team, manifest)
    logger.info("prepared %d training tasks and %d held-out tasks", len(train), len(evaluation))
    return {"train": len(train), "eval": len(evaluation)}
