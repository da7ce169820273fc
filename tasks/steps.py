"""Finished steps of an iteration: files in a scratch folder, each written whole, published by rename at the
end.

The folder's name is a digest of everything that decides the iteration's content, so a step's file is either
from exactly this work or not there. An iteration that was interrupted finds its finished steps and goes on
with the next one.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_core.digests import digest_values
from comlrl_core.files import sha256_file
from comlrl_core.store import manifest_digest
from tasks.job import Job

NAME_DIGITS = 16


@dataclass(frozen=True)
class Steps:
    """The scratch folder of one iteration and the names of its steps' files."""

    folder: Path
    inputs: str

    def candidates(self, chunk: int) -> Path:
        return self.folder / f"candidates_{chunk:04d}.jsonl"

    def scored(self, chunk: int) -> Path:
        return self.folder / f"scored_{chunk:04d}.jsonl"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs"

    @property
    def entry(self) -> Path:
        return self.folder / "entry.json"

    @property
    def drawn(self) -> Path:
        return self.folder / "drawn.jsonl"

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def steps_of(job: Job, iteration: int) -> Steps:
    """The steps of `iteration`; the iteration before must be published."""
    inputs = inputs_digest(job, iteration)
    return Steps(job.scratch / f"iteration_{iteration:04d}-{inputs[:NAME_DIGITS]}", inputs)


def inputs_digest(job: Job, iteration: int) -> str:
    """Digest of all that decides the content of `iteration`."""
    from tasks.loading import oracle

    if iteration == 0:
        training = job.config.training
        tasks = job.config.tasks.model_dump(mode="json")
        return digest_values("initial", _team_identity(job), training.seed, training.num_agents, tasks, job.code)
    return digest_values(
        "iteration",
        iteration,
        training_identity(job),
        _team_identity(job),
        oracle(job).label,
        job.config.reward.model_dump(mode="json"),
        sha256_file(job.train_tasks),
        manifest_digest(job.store, iteration - 1),
        job.code,
    )


def training_identity(job: Job) -> dict[str, Any]:
    """The training settings without the length of the run."""
    values = job.config.training.model_dump(mode="json")
    values.pop("num_iterations", None)
    return values


def _team_identity(job: Job) -> dict[str, Any]:
    return job.config.team.model_dump(mode="json")
