"""Checkpoints of the Python trainers: policies, manifest and optimizer state in one folder each."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.preference_learning import Learned, save_training_state
from comlrl_core.engine.protocol import Engine
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.store import MANIFEST, Manifest, whole_folder
from comlrl_core.team.checkpoint import save_team
from comlrl_core.team.team import Team

STATE = "state"
_NAME = re.compile(r"(iteration|epoch)_(\d{4,})")


def save_checkpoint(
    folder: Path,
    team: Team,
    engines: Sequence[Engine],
    config: MADPOConfig,
    manifest: Manifest,
    learned: Learned,
) -> None:
    """Write a checkpoint that `train(resume_from_checkpoint=folder)` goes on from; complete or absent."""
    with whole_folder(folder) as staging:
        save_team(team, staging)
        save_training_state(staging / STATE, engines, config, manifest.iteration, learned)
        manifest.write(staging / MANIFEST)


def find_checkpoint(resume_from: str | Path | bool, checkpoint_dir: str | Path | None) -> Path:
    """The checkpoint folder that `resume_from_checkpoint` means: itself, or the newest below it (True: below `checkpoint_dir`)."""
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
    if limit < 1:
        raise ConfigError(f"checkpoint_total_limit must be at least 1 or None, not {limit}")
    for path in list_checkpoints(folder)[:-limit]:
        shutil.rmtree(path)
