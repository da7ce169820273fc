"""Rollout: one pass over the tasks with algorithms that learn from the rewards of their own answers."""

import logging
from pathlib import Path
from typing import Any

from prefect import task

from comlrl_core.algorithms.reinforce import Hooks, reinforce_epoch, reinforce_settings, steps_per_epoch
from comlrl_core.algorithms.shared import Learned, Metrics
from comlrl_core.engine.protocol import agents_by_engine
from comlrl_core.files import iter_jsonl, write_jsonl
from comlrl_core.store import MANIFEST
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.launching import launched
from tasks.loading import oracle, reference, settle, take, train_tasks, transition
from tasks.pruned import curve_path
from tasks.steps import steps_of
from tasks.update import write_finished

logger = logging.getLogger("comlrl_core.stages")

ROLLOUTS = "rollouts.jsonl"


@task(name="rollout", **OPTIONS)
@launched
def rollout(job: Job, iteration: int) -> Path:
    """Roll out and learn from every training task once; returns the folder of the new weights (not published yet)."""
    steps = steps_of(job, iteration)
    if (steps.policy / MANIFEST).is_file():
        logger.info("iteration %d: the update is there already", iteration)
        return steps.policy
    settle(job)
    config, tasks = job.rollouts, train_tasks(job)
    settings = reinforce_settings(config)
    left = take(job, iteration - 1)
    if iteration == 1:
        total = job.config.num_iterations * steps_per_epoch(len(tasks), left.team.num_agents, settings)
        for engine, _ in agents_by_engine(left.engines):
            engine.begin(total)
    collected: list[dict[str, Any]] = []

    def on_rollout(metrics: Metrics, environment_steps: int) -> None:
        collected.append({**metrics, "environment_steps": environment_steps, "iteration": iteration})

    learned = reinforce_epoch(
        left.team,
        left.engines,
        tasks,
        oracle(job),
        settings,
        epoch=iteration - 1,  # the streams of the Python trainer's epochs
        learned=Learned([], left.environment_steps),
        transition=transition(job),
        reference=reference(job, left.team) if config.reference_kl_enabled else None,
        hooks=Hooks(on_rollout=on_rollout),
    )
    left.environment_steps = learned.environment_steps
    write_finished(job, iteration, steps, left, learned, None, lambda state: write_jsonl(state / ROLLOUTS, collected))
    return steps.policy


def rollout_metrics(job: Job, iteration: int) -> list[dict[str, Any]]:
    """The metrics of every collection of a published iteration (none for algorithms that learn from preferences)."""
    path = curve_path(job, iteration, ROLLOUTS)
    return [row for _, row in iter_jsonl(path)] if path.is_file() else []
