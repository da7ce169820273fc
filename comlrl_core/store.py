"""Where a run keeps its iterations, and the manifest that ties each one to its past.

    replay/iteration_0001.json (+ .meta.json)
    models/iteration_0001/{agent_0/ ..., manifest.json}
    state/iteration_0001/

Iteration 0 is the initial team. Nothing here holds a time, a host or an absolute path, so equal runs give equal bytes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from comlrl_core.errors import DataError
from comlrl_core.files import read_json, sha256_file, sync_folder, write_json
from comlrl_core.preference import fields

MANIFEST = "manifest.json"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Store:
    """The three folders of a run's iterations."""

    replay: Path
    models: Path
    state: Path

    @classmethod
    def below(cls, root: Path) -> "Store":
        """The layout of a project: `replay/`, `models/` and `state/` under `root`."""
        return cls(root / "replay", root / "models", root / "state")

    def policy(self, iteration: int) -> Path:
        """Folder of the policies that `iteration` left behind."""
        return self.models / f"iteration_{iteration:04d}"

    def training_state(self, iteration: int) -> Path:
        """Folder of optimizer moments and counters after `iteration`."""
        return self.state / f"iteration_{iteration:04d}"

    def manifest(self, iteration: int) -> "Manifest":
        """The manifest of `iteration`; `DataError` where it is missing or damaged."""
        return Manifest.read(self.policy(iteration) / MANIFEST)

    def has(self, iteration: int) -> bool:
        """Whether `iteration` was published (its manifest is written last)."""
        return (self.policy(iteration) / MANIFEST).is_file()


@dataclass(frozen=True)
class IterationEntry:
    """One iteration file of a run's history: its number, how many pairs it holds and the SHA-256 of its bytes."""

    iteration: int
    num_pairs: int
    digest: str

    @classmethod
    def from_json(cls, value: Any, where: str) -> "IterationEntry":
        """The entry that `asdict` gave; a `DataError` names `where` and the field at fault."""
        fields.exact_keys(value, ("iteration", "num_pairs", "digest"), (), where)
        return cls(
            fields.integer(value, "iteration", where, minimum=1),
            fields.integer(value, "num_pairs", where, minimum=0),
            fields.string(value, "digest", where),
        )


@dataclass(frozen=True)
class Manifest:
    """What an iteration was made from.

    Attributes:
        iteration: its number; 0 for the initial team.
        inputs: digest of everything that decided its content (settings, tasks, oracle, code, the manifest before).
        environment_steps: joint responses trained on so far.
        history: every iteration file up to this one, oldest first; the files that a later draw may use.
        previous: SHA-256 of the manifest before, so that one manifest stands for all of its past.
        policy: fingerprint of the weights beside it (`Team.fingerprint`).
    """

    iteration: int
    inputs: str
    environment_steps: int
    history: tuple[IterationEntry, ...]
    previous: str | None
    policy: str

    def write(self, path: Path) -> None:
        """Write the manifest (at once)."""
        write_json(path, asdict(self), indent=2)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a manifest; a `DataError` names the file and the field at fault."""
        values = read_json(path)
        kinds: dict[str, type] = {
            "iteration": int,
            "inputs": str,
            "environment_steps": int,
            "history": list,
            "policy": str,
        }
        if not isinstance(values, dict):
            raise DataError(f"{path}: a mapping is expected")
        for name, kind in kinds.items():
            if not isinstance(values.get(name), kind) or isinstance(values.get(name), bool):
                raise DataError(f"{path}: {name} must be {kind.__name__}, not {values.get(name)!r}")
        if not isinstance(values.get("previous"), str | None):
            raise DataError(f"{path}: previous must be str or null, not {values['previous']!r}")
        history = tuple(
            IterationEntry.from_json(entry, f"{path}: history[{number}]")
            for number, entry in enumerate(values.pop("history"))
        )
        try:
            return cls(history=history, **values)
        except TypeError as error:
            raise DataError(f"{path}: not a manifest of this version: {error}") from None

    def eligible(self) -> list[int]:
        """Iterations whose files may be drawn from, oldest first."""
        return [entry.iteration for entry in self.history]

    def next(self, *, inputs: str, previous: str, entry: IterationEntry | None, environment_steps: int) -> "Manifest":
        """The manifest of the iteration after this one (its `policy` is filled in when it is published)."""
        return replace(
            self,
            iteration=self.iteration + 1,
            inputs=inputs,
            previous=previous,
            history=self.history if entry is None else (*self.history, entry),
            environment_steps=environment_steps,
            policy="",
        )


def initial_manifest(inputs: str) -> Manifest:
    """The manifest of the initial team."""
    return Manifest(iteration=0, inputs=inputs, environment_steps=0, history=(), previous=None, policy="")


def read_progress(folder: Path) -> int:
    """The environment steps that a training state counts. Raises `DataError` naming file and field."""
    path = folder / PROGRESS
    values = read_json(path)
    steps = values.get("environment_steps") if isinstance(values, dict) else None
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise DataError(f"{path}: environment_steps must be a whole number, not {steps!r}")
    return steps


def manifest_digest(store: Store, iteration: int) -> str:
    """SHA-256 of the manifest of `iteration`."""
    return sha256_file(store.policy(iteration) / MANIFEST)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `target` by one rename if the block ends without an error, else it is removed.

    A `target` that is already there is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    move_folder(staging, target)


def move_folder(source: Path, target: Path) -> None:
    """Put `source` in the place of `target` by rename (both on one file system)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        outdated = target.with_name(f".{target.name}.{os.getpid()}.outdated")
        shutil.rmtree(outdated, ignore_errors=True)
        os.replace(target, outdated)
        os.replace(source, target)
        shutil.rmtree(outdated, ignore_errors=True)
    else:
        os.replace(source, target)
    sync_folder(target.parent)


def link_folder(source: Path, target: Path) -> None:
    """Make `target` a copy of `source`, complete or absent, by hard links where the file system has them."""
    with whole_folder(target) as staging:
        shutil.copytree(source, staging, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def check_unoccupied(replay: Path) -> None:
    """Refuse a replay folder that already holds iteration files of another run."""
    found = sorted(replay.glob("iteration_*.json")) if replay.is_dir() else []
    if found:
        raise DataError(
            f"{replay}: already holds iteration files ({found[0].name} ...) of another run; name an empty folder in "
            "preference_replay_dir, or resume that run"
        )


def verify_history(store: Store, manifest: Manifest) -> None:
    """Check that the iteration files which a manifest lists are there, byte for byte."""
    from comlrl_core.preference.files import iteration_path

    for entry in manifest.history:
        path = iteration_path(store.replay, entry.iteration)
        if not path.is_file():
            raise DataError(f"{path}: missing, but iteration {manifest.iteration} was made from it")
        if sha256_file(path) != entry.digest:
            raise DataError(f"{path}: changed since iteration {manifest.iteration} was made from it")


def latest(store: Store) -> int | None:
    """The newest published iteration, or None."""
    if not store.models.is_dir():
        return None
    names = [path.parent.name.removeprefix("iteration_") for path in store.models.glob(f"iteration_*/{MANIFEST}")]
    return max((int(name) for name in names if name.isdecimal()), default=None)
