"""Where critics lie and what their settings file says; without PyTorch, so that files can be checked early."""

from pathlib import Path
from typing import Any

from comlrl_core.errors import DataError
from comlrl_core.files import read_json
from comlrl_core.team.sources import check_model_folder, check_safetensors

FOLDER = "critic"
SETTINGS_FILE = "critic.json"
HEAD_FILE = "value_head.safetensors"
FORMAT = 1


def critic_folder(folder: Path, central: bool, index: int) -> Path:
    """Where a critic of a team lies below `folder`."""
    return folder if central else folder / f"agent_{index}"


def check_critics(folder: Path) -> None:
    """Refuse critics below `folder` whose settings, head or backbone cannot be read."""
    for path in sorted(folder.rglob(SETTINGS_FILE)):
        check_critic(path.parent)


def check_critic(folder: Path) -> None:
    """Refuse a saved critic whose settings, head or backbone cannot be read."""
    read_settings(folder)
    check_safetensors(folder / HEAD_FILE)
    if (folder / "config.json").exists():
        check_model_folder(folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """What a saved critic's head and inputs are like. Raises `DataError` naming file and field."""
    path = folder / SETTINGS_FILE
    settings = read_json(path)
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise DataError(f"{path}: not the settings of a critic that this version reads")
    for name in ("hidden_dim", "max_length"):
        value = settings.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise DataError(f"{path}: {name} must be a whole number from 1 or null, not {value!r}")
    return settings
