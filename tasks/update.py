"""Update: the policies learn from the drawn pairs, and the iteration is published."""

import logging
from pathlib import Path
from typing import Any

from prefect import task

from comlrl_core.algorithms.preference_learning import (
    UPDATES,
    Learned,
    learn,
    make_engines,
    save_training_state,
)
from comlrl_core.files import iter_jsonl, read_jsonl
from comlrl_core.preference.records import PairRecord, from_json
from comlrl_core.publishing import publish_policy
from comlrl_core.store import MANIFEST, manifest_digest, move_folder, whole_folder
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.loading import Live, keep, policy, settle, take
from tasks.pair import entry_of
from tasks.steps import Steps, steps_of

logger = logging.getLogger("comlrl_core.stages")


@task(name="update", **OPTIONS)
def update(job: Job, iteration: int) -> Path:
    """Train the team on the drawn pairs; returns the folder of its new weights (not published yet)."""
    steps = steps_of(job, iteration)
    if (steps.policy / MANIFEST).is_file():
        logger.info("iteration %d: the update is there already", iteration)
        return steps.policy
    settle(job)
    config = job.config.training
    left = take(job, iteration - 1)
    if config.optimizer_state == "reset":
        left.engines = make_engines(left.team, config)
    learned = learn(
        left.team,
        left.engines,
        read_records(steps.drawn),
        config,
        iteration=iteration,
        environment_steps=left.environment_steps,
        load_initial=lambda: policy(job, 0, config.reference_devices),
    )
    left.environment_steps = learned.environment_steps
    _write(job, iteration, steps, left, learned)
    return steps.policy


def _write(job: Job, iteration: int, steps: Steps, left: Live, learned: Learned) -> None:
    with whole_folder(steps.state) as state:
        save_training_state(state, left.engines, job.config.training, iteration, learned)
    before = job.store.manifest(iteration - 1)
    manifest = before.next(
        inputs=steps.inputs,
        previous=manifest_digest(job.store, iteration - 1),
        entry=entry_of(steps),
        environment_steps=learned.environment_steps,
    )
    publish_policy(steps.policy, left.team, manifest)
    _unpublished[(job.work_root, iteration)] = left


_unpublished: dict[tuple[Path, int], Live] = {}


@task(name="publish", **OPTIONS)
def publish(job: Job, iteration: int) -> Path:
    """Move the finished state and policies to their places; the policies' manifest comes last and completes
    it.
    """
    steps = steps_of(job, iteration)
    if steps.state.is_dir():
        move_folder(steps.state, job.store.training_state(iteration))
    target = job.store.policy(iteration)
    move_folder(steps.policy, target)
    steps.clear()
    left = _unpublished.pop((job.work_root, iteration), None)
    if left is not None:
        keep(job, iteration, left)
    return target


def read_records(path: Path) -> list[PairRecord]:
    """The pairs that `sample` drew."""
    return [from_json(value, f"{path}: line {number}") for number, value in iter_jsonl(path)]


def update_metrics(job: Job, iteration: int) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a published iteration."""
    path = job.store.training_state(iteration) / UPDATES
    return read_jsonl(path) if path.is_file() else []
