"""Update: the policies learn from the drawn pairs, and the iteration is published."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task

from comlrl_core.algorithms.preference_learning import (
    UPDATES,
    Learned,
    learn,
    save_training_state,
)
from comlrl_core.critics.files import save_critics
from comlrl_core.critics.layout import FOLDER as CRITIC_FOLDER
from comlrl_core.engine.processes import by_first
from comlrl_core.files import read_jsonl, sha256_file, write_json
from comlrl_core.preference.reward_model.files import FOLDER
from comlrl_core.publishing import folder_for_all, publish_policy
from comlrl_core.store import MANIFEST, IterationEntry, link_folder, manifest_digest
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.launching import launched
from tasks.loading import Live, keep, reference, settle, take
from tasks.pair import entry_of
from tasks.pruned import curve_path
from tasks.records import read_records
from tasks.reward_model import METRICS, learn_from_reward_model
from tasks.steps import Steps, steps_of

logger = logging.getLogger("comlrl_core.stages")


@task(name="update", **OPTIONS)
@launched
def update(job: Job, iteration: int) -> Path:
    """Train the team on the drawn pairs; returns the folder of its new weights (not published yet)."""
    steps = steps_of(job, iteration)
    if (steps.policy / MANIFEST).is_file():
        logger.info("iteration %d: the update is there already", iteration)
        return steps.policy
    settle(job)
    config = job.preference
    left = take(job, iteration - 1)
    if config.optimizer_state == "reset":
        left.reset_engines(job.config)
    if job.config.fits_reward_model():
        learned, measures = learn_from_reward_model(job, iteration, steps, left)

        def write_more(state: Path) -> None:
            write_json(state / METRICS, measures, indent=2)
    else:
        learned = learn(
            left.team,
            left.engines,
            read_records(steps.drawn),
            config,
            iteration=iteration,
            environment_steps=left.environment_steps,
            load_initial=lambda: reference(job, left.team),
        )

        def write_more(state: Path) -> None:
            return None

    left.environment_steps = learned.environment_steps
    write_finished(job, iteration, steps, left, learned, entry_of(steps), write_more)
    return steps.policy


def write_finished(
    job: Job,
    iteration: int,
    steps: Steps,
    left: Live,
    learned: Learned,
    entry: IterationEntry | None,
    write_more: Callable[[Path], object] = lambda state: None,
) -> None:
    """Write the finished state (`write_more` adds to its folder) and the new policies with their manifest to `steps`.

    `entry` is the iteration file that the iteration wrote, None for algorithms that write none.
    """
    with folder_for_all(steps.state) as state:
        save_training_state(state, left.engines, job.config.training, iteration, learned, left.critic_engines)
        by_first(lambda: write_more(state))
    if left.critics is not None:
        save_critics(left.critics, steps.critic)
    before = job.store.manifest(iteration - 1)
    manifest = before.next(
        inputs=steps.inputs,
        previous=manifest_digest(job.store, iteration - 1),
        entry=entry,
        environment_steps=learned.environment_steps,
    )
    publish_policy(steps.policy, left.team, manifest, beside={FOLDER: steps.reward_model, CRITIC_FOLDER: steps.critic})
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


def update_metrics(job: Job, iteration: int) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a published iteration."""
    path = curve_path(job, iteration, UPDATES)
    return read_jsonl(path) if path.is_file() else []
