"""Rollout: one pass over the tasks with algorithms that learn from the rewards of their own answers."""

import logging
from pathlib import Path
from typing import Any

from prefect import task

from comlrl_core.algorithms.actor_critic import actor_critic_epoch, actor_critic_settings, begin
from comlrl_core.algorithms.actor_critic_config import MAACConfig
from comlrl_core.algorithms.reinforce import reinforce_epoch, reinforce_settings, steps_per_epoch
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import Learned, Metrics
from comlrl_core.engine.protocol import agents_by_engine
from comlrl_core.files import iter_jsonl, write_jsonl
from comlrl_core.store import MANIFEST
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.launching import launched
from tasks.loading import Live, oracle, reference, settle, take, train_tasks, transition
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
    left = take(job, iteration - 1)
    collected: list[dict[str, Any]] = []

    def on_rollout(metrics: Metrics, environment_steps: int) -> None:
        collected.append({**metrics, "environment_steps": environment_steps, "iteration": iteration})

    learned = _learn(job, iteration, left, Hooks(on_rollout=on_rollout))
    left.environment_steps = learned.environment_steps
    write_finished(job, iteration, steps, left, learned, None, lambda state: write_jsonl(state / ROLLOUTS, collected))
    return steps.policy


def _learn(job: Job, iteration: int, left: Live, hooks: Hooks) -> Learned:
    """The epoch of `iteration`, with the streams of the Python trainer's epochs."""
    config, tasks, epochs = job.rollouts, train_tasks(job), job.config.num_iterations
    epoch: dict[str, Any] = {
        "epoch": iteration - 1,
        "learned": Learned([], left.environment_steps),
        "transition": transition(job),
        "reference": reference(job, left.team) if config.reference_kl_enabled else None,
        "hooks": hooks,
    }
    if isinstance(config, MAACConfig):
        rules = actor_critic_settings(config)
        assert left.critics is not None
        if iteration == 1:
            begin(left.engines, left.critics, epochs * rules.steps_per_epoch(len(tasks)))
        return actor_critic_epoch(left.team, left.engines, left.critics, tasks, oracle(job), rules, **epoch)
    settings = reinforce_settings(config)
    if iteration == 1:
        total = epochs * steps_per_epoch(len(tasks), left.team.num_agents, settings)
        for engine, _ in agents_by_engine(left.engines):
            engine.begin(total)
    return reinforce_epoch(left.team, left.engines, tasks, oracle(job), settings, **epoch)


def rollout_metrics(job: Job, iteration: int) -> list[dict[str, Any]]:
    """The metrics of every collection of a published iteration (none for algorithms that learn from preferences)."""
    path = curve_path(job, iteration, ROLLOUTS)
    return [row for _, row in iter_jsonl(path)] if path.is_file() else []
