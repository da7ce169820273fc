"""Checkpoints of the Python trainers: policies, manifest and optimizer state in one folder each."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comlrl_core.algorithms.shared import Learned, OptimizationConfig, save_training_state
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.files import save_critics
from comlrl_core.critics.layout import FOLDER
from comlrl_core.engine.processes import by_first
from comlrl_core.engine.protocol import Engine
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import read_json, write_json
from comlrl_core.publishing import folder_for_all
from comlrl_core.store import MANIFEST, Manifest
from comlrl_core.team.checkpoint import save_team
from comlrl_core.team.team import Team

STATE = "state"
IDENTITY = "identity.json"
_NAME = re.compile(r"(iteration|epoch)_(\d{4,})")


def save_checkpoint(
    folder: Path,
    team: Team,
    engines: Sequence[Engine],
    config: OptimizationConfig,
    manifest: Manifest,
    learned: Learned,
    identity: Mapping[str, Any],
    save_beside: Callable[[Path], None] | None = None,
    critics: Critics | None = None,
) -> None:
    """Write a checkpoint that `train(resume_from_checkpoint=folder)` goes on from; complete or absent.

    `identity` is what `manifest.inputs` is the digest of, so that a run which differs can be told in what.
    `save_beside` writes what else belongs to it. Of several processes, all have to call it, and the first writes.
    """
    with folder_for_all(folder) as staging:
        save_team(team, staging)
        if save_beside is not None:
            save_beside(staging)
        if critics is not None:
            save_critics(critics, staging / FOLDER)
        critic_engines = () if critics is None else critics.engines
        save_training_state(staging / STATE, engines, config, manifest.iteration, learned, critic_engines)
        by_first(lambda: write_json(staging / STATE / IDENTITY, dict(identity), indent=2))
        by_first(lambda: manifest.write(staging / MANIFEST))


def differences(checkpoint: Path, identity: Mapping[str, Any]) -> list[str]:
    """In what a run differs from the one that wrote `checkpoint`, one text per setting."""
    before = read_json(checkpoint / STATE / IDENTITY)
    if not isinstance(before, dict):
        raise DataError(f"{checkpoint / STATE / IDENTITY}: a mapping is expected")
    names = [*identity, *(name for name in before if name not in identity)]
    return [
        f"{name} is {identity.get(name)!r}, was {before.get(name)!r}"
        for name in names
        if identity.get(name) != before.get(name)
    ]


def check_checkpointing(interval: int, limit: int | None) -> None:
    """Refuse an interval or a limit below one before anything is trained."""
    if interval < 1:
        raise ConfigError(f"checkpoint_interval must be at least 1, not {interval}")
    if limit is not None and limit < 1:
        raise ConfigError(f"checkpoint_total_limit must be at least 1 or None, not {limit}")


def find_checkpoint(resume_from: str | Path | bool, checkpoint_dir: str | Path | None) -> Path:
    """The folder that `resume_from_checkpoint` means: itself, or the newest below it (True: below `checkpoint_dir`)."""
    if resume_from is True and checkpoint_dir is None:
        raise ConfigError("resume_from_checkpoint=True needs checkpoint_dir, the folder to look in")
    folder = Path(checkpoint_dir) if resume_from is True and checkpoint_dir else Path(str(resume_from))
    if (folder / MANIFEST).is_file():
        return folder
    found = list_checkpoints(folder)
    if not found:
        raise DataError(f"{folder}: no checkpoint there (a folder with {MANIFEST}, agents and {STATE}/)")
    return found[-1]


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.partition("_")[2]))


def keep_newest(folder: Path, limit: int | None) -> None:
    """Remove all but the newest `limit` checkpoints below `folder` (None: keep all)."""
    if limit is None:
        return

    def remove() -> None:
        for path in list_checkpoints(folder)[:-limit]:
            shutil.rmtree(path)

    by_first(remove)
