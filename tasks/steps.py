"""Finished steps of an iteration: files in a scratch folder, each written whole, published by rename at the
end.

The folder's name is a digest of everything that decides the iteration's content, so a step's file is either
from exactly this work or not there. An iteration that was interrupted finds its finished steps and goes on
with the next one.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from comlrl_core.config.run import OFFLINE, length_field
from comlrl_core.digests import digest_values
from comlrl_core.files import sha256_file
from comlrl_core.rewards.loading import BUILTIN_PREFIX, load_reward
from comlrl_core.store import manifest_digest
from tasks.job import BUILTIN_TRANSITIONS, Job
from tasks.launching import end_leftovers
from tasks.oracle import oracle

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
    def fit(self) -> Path:
        return self.folder / "fit.json"

    @property
    def reward_model(self) -> Path:
        return self.folder / "reward_model"

    @property
    def critic(self) -> Path:
        return self.folder / "critic"

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    @property
    def state(self) -> Path:
        return self.folder / "state"


def clear_before(job: Job, iteration: int) -> None:
    """Remove the steps of iterations before `iteration`, which are published and recorded by now."""
    for folder in job.scratch.glob("iteration_*-*"):
        number = folder.name.removeprefix("iteration_").partition("-")[0]
        if number.isdigit() and int(number) < iteration:
            shutil.rmtree(folder, ignore_errors=True)


def clear_aside(job: Job) -> None:
    """End processes that a killed run left behind, and remove what it had begun to write aside.

    Only for who holds the project's lock.
    """
    end_leftovers(job)
    root = job.work_root
    for folder in (root / "data", job.store.replay, job.store.models, job.store.state, job.plots, job.scratch):
        for path in [*folder.rglob(".*.tmp"), *folder.rglob(".*.partial")]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def steps_of(job: Job, iteration: int) -> Steps:
    """The steps of `iteration`; the iteration before must be published."""
    inputs = inputs_digest(job, iteration)
    return Steps(job.scratch / f"iteration_{iteration:04d}-{inputs[:NAME_DIGITS]}", inputs)


def inputs_digest(job: Job, iteration: int) -> str:
    """Digest of all that decides the content of `iteration`."""
    if iteration == 0:
        training = job.config.training
        tasks = job.config.tasks.model_dump(mode="json")
        named = [job.config.tasks.train, job.config.tasks.eval, job.config.team.agent_model]
        files = _files_identity(job, [*named, *(job.config.team.agents or [])])
        return digest_values("initial", _team_identity(job), training.seed, training.num_agents, tasks, files, job.code)
    return inputs_after(job, iteration, manifest_digest(job.store, iteration - 1))


def inputs_after(job: Job, iteration: int, previous: str) -> str:
    """Digest of all that decides the content of `iteration` (from 1), given the digest of the manifest before it."""
    return digest_values(
        "iteration",
        iteration,
        training_identity(job),
        _team_identity(job),
        oracle(job).label,
        job.config.reward.model_dump(mode="json"),
        _files_identity(job, job.config.further_models()),
        sha256_file(job.train_tasks),
        _transition_identity(job),
        previous,
        job.code,
    )


def training_identity(job: Job) -> dict[str, Any]:
    """The training settings without the length of the run."""
    values = job.config.training.model_dump(mode="json", exclude={"engine", "lora"}) | job.config.engine.identity()
    decays = job.config.learns_from_rewards() and job.config.training.lr_schedule in ("linear", "cosine")
    if job.config.algorithm not in OFFLINE and not decays:  # a schedule over all epochs depends on their number
        values.pop(length_field(type(job.config.training)))
    return values


def _team_identity(job: Job) -> list[Any]:
    team = job.config.team
    formatter = load_reward(team.formatter, None, job.source_root, "team.formatter").version if team.formatter else None
    return [team.model_dump(mode="json"), formatter]


def _transition_identity(job: Job) -> list[Any]:
    spec = job.config.tasks.transition
    if spec is None or spec in BUILTIN_TRANSITIONS:
        return [spec]
    return [spec, load_reward(spec, None, job.source_root, "tasks.transition").version]


def _files_identity(job: Job, names: Iterable[str | None]) -> dict[str, Any]:
    """Digests of those task files and model folders in `names` that lie in the project; other names say all already."""
    found = {}
    for name in filter(None, names):
        path = job.source_root / name.partition("[")[0]
        if path.exists() and not name.startswith(BUILTIN_PREFIX):
            files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
            found[name] = [(p.relative_to(path).as_posix(), file_digest(p)) for p in files]
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read once as long as its size and time of change stay."""
    known = path.stat()
    return _digest_of(path, known.st_size, known.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, size: int, modified: int) -> str:
    """A model folder of some gigabytes is read once, though every step asks for its digest."""
    return sha256_file(path)
