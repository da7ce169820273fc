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
from comlrl_core.files import iter_jsonl, read_jsonl, sha256_file
from comlrl_core.preference.records import PairRecord, from_json
from comlrl_core.publishing import publish_policy
from comlrl_core.store import MANIFEST, link_folder, manifest_digest, whole_folder
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
    """Put the finished state and policies in their places; the policies come last and complete the iteration.

    The steps' files stay until the iteration after has begun: whoever runs the pipeline may not have recorded this one.
    """
    steps = steps_of(job, iteration)
    target = job.store.policy(iteration)
    if not _is_published(steps.policy, target, job.store.training_state(iteration)):
        link_folder(steps.state, job.store.training_state(iteration))
        link_folder(steps.policy, target)
    left = _unpublished.pop((job.work_root, iteration), None)
    if left is not None:
        keep(job, iteration, left)
    return target


def _is_published(finished: Path, target: Path, state: Path) -> bool:
    """Whether `target` was published from the step `finished` already."""
    manifests = (finished / MANIFEST, target / MANIFEST)
    return (
        state.is_dir()
        and all(path.is_file() for path in manifests)
        and sha256_file(manifests[0]) == sha256_file(manifests[1])
    )


def read_records(path: Path) -> list[PairRecord]:
    """The pairs that `sample` drew."""
    return [from_json(value, f"{path}: line {number}") for number, value in iter_jsonl(path)]


def update_metrics(job: Job, iteration: int) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a published iteration."""
    path = job.store.training_state(iteration) / UPDATES
    return read_jsonl(path) if path.is_file() else []
