"""Pair: scored answers become preference pairs and an iteration file."""

import logging
import shutil
from dataclasses import asdict
from typing import Any

from prefect import task

from comlrl_core.comparators.history import history_index
from comlrl_core.comparators.opening import comparator_sources
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.files import atomic_write_bytes, read_json, write_json
from comlrl_core.preference.candidates import read_candidates
from comlrl_core.preference.files import iteration_path, meta_path
from comlrl_core.preference.iteration import write_pairs
from comlrl_core.store import IterationEntry
from tasks.calling import OPTIONS
from tasks.collect import num_chunks
from tasks.job import Job
from tasks.loading import release_comparator
from tasks.reward_model import pair_oracle
from tasks.steps import Steps, steps_of

logger = logging.getLogger("comlrl_core.stages")


@task(name="pair", **OPTIONS)
def pair(job: Job, iteration: int) -> dict[str, Any]:
    """Write `replay/iteration_NNNN.json` and its meta file; returns the counts of pairing."""
    release_comparator()
    steps = steps_of(job, iteration)
    if not steps.entry.is_file():
        candidates = [c for chunk in range(num_chunks(job)) for c in read_candidates(steps.scored(chunk))]
        shutil.rmtree(steps.pairs, ignore_errors=True)
        _, entry = write_pairs(
            steps.pairs,
            iteration,
            candidates,
            pair_oracle(job, iteration),
            job.preference,
            policy=job.store.manifest(iteration - 1).policy,
            comparator=comparator_version(job, iteration),
        )
        write_json(steps.entry, asdict(entry))
    meta = read_json(meta_path(steps.pairs, iteration))
    for path in (
        iteration_path,
        meta_path,
    ):  # the finished step stays where it is until the iteration is whole
        atomic_write_bytes(path(job.store.replay, iteration), path(steps.pairs, iteration).read_bytes())
    counts: dict[str, Any] = meta["counts"]
    logger.info(
        "iteration %d: %d pairs from %d tasks (%d ties, %d near-ties, %d duplicates, %d dropped)",
        iteration, counts["pairs"], counts["tasks"], counts["ties"], counts["near_ties"], counts["duplicates"],
        counts["dropped"],
    )  # fmt: skip
    return counts


def entry_of(steps: Steps) -> IterationEntry:
    """The manifest entry that `pair` left behind."""
    return IterationEntry.from_json(read_json(steps.entry), str(steps.entry))


def comparator_version(job: Job, iteration: int) -> str | None:
    """Who answers on the other side of `iteration`, for the record: `Comparator.version`, without loading a team."""
    training = job.preference
    if not isinstance(training, ComparatorFields):
        return None
    if training.comparator_policy == "history":
        return f"iteration_{history_index(iteration, training.comparator_history_k):04d}"
    if training.comparator_policy == "model":
        return ", ".join(dict.fromkeys(comparator_sources(training, training.num_agents)))
    return "current"  # a copy of it is no other team
