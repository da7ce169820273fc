"""An engine's state as a file: moments, fp32 masters and the schedule, whole tensors by parameter name.

The file says nothing about who wrote it: what one engine wrote, every other engine loads, on any number of processes.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from comlrl_core.errors import DataError
from comlrl_core.files import sync_folder

STATE_FILE = "engine.safetensors"
_FORMAT = 1


def write_state(directory: Path, tensors: Mapping[str, Tensor], step: int, total_steps: int | None) -> None:
    """Write `directory/engine.safetensors`, whole or not at all. Equal states give equal bytes.

    Args:
        tensors: `kind/parameter` -> tensor, where `kind` is `master` or an entry of the optimizer's state.
        step: of the schedule. total_steps: of a schedule that decays, else None.
    """
    # One metadata entry only: safetensors writes several in no fixed order.
    header = {"format": _FORMAT, "step": step, "total_steps": total_steps}
    metadata = {"engine": json.dumps(header, sort_keys=True)}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / STATE_FILE
    aside = path.with_name(f".{STATE_FILE}.{os.getpid()}")
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, aside, metadata)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(directory)
    finally:
        aside.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state file, and its `step` and `total_steps`. Raises `DataError` for a torn or alien one."""
    if not path.is_file():
        raise DataError(f"{path}: no saved engine state there")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["engine"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # safetensors raises its own class, derived from Exception alone
        raise DataError(f"{path}: not a readable engine state ({error})") from error
    if header.get("format") != _FORMAT:
        raise DataError(f"{path}: engine state of format {header.get('format')!r}; this version reads {_FORMAT}")
    return tensors, header
