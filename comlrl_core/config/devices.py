"""Devices that settings name: which settings do, and whether the devices are here. Imports PyTorch only for a GPU."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comlrl_core.errors import ConfigError

DEVICES = "cpu, cuda, cuda:0, cuda:1 ..."
DEVICE_FIELDS = ("agent_devices", "reference_devices", "comparator_devices", "critic_devices", "reward_model_device")
_CPU = re.compile(r"cpu(:0)?")
_GPU = re.compile(r"cuda(:\d+)?|mps(:0)?")
_GPU_ENTRIES = ("nvidia*", "nvmap", "nvhost-gpu", "kfd", "dxg")  # of /dev: NVIDIA, Jetson, ROCm, WSL


def named_devices(settings: Any) -> Iterator[tuple[str, list[str]]]:
    """The settings of a training that name devices, each with the names."""
    for field in DEVICE_FIELDS:
        given = getattr(settings, field, None)
        if given is not None:
            yield field, [given] if isinstance(given, str) else list(given)


def check_devices(settings: Any) -> None:
    """Refuse a device that this machine does not have. Raises `ConfigError` naming the setting and what is allowed."""
    for field, names in named_devices(settings):
        for name in names:
            try:
                check_device(name)
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}") from None


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have (`ConfigError`); "auto" is always there."""
    if name == "auto" or _CPU.fullmatch(name):
        return
    if not _GPU.fullmatch(name):
        raise ConfigError(f"there is no device {name!r} to train on; allowed: {DEVICES}")
    nowhere = sys.platform == "linux" and not any(list(Path("/dev").glob(entry)) for entry in _GPU_ENTRIES)
    if nowhere:  # PyTorch would say the same, some seconds later
        raise ConfigError(f"the device {name!r} is not here: this machine has no usable GPU; allowed: cpu")
    import torch

    if name.startswith("mps"):
        if not torch.backends.mps.is_available():
            raise ConfigError(f"the device {name!r} is not here; allowed: {DEVICES}")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigError(f"the device {name!r} is not here: this machine has no usable GPU; allowed: cpu")
    if int(name.partition(":")[2] or 0) >= count:
        here = ", ".join(f"cuda:{index}" for index in range(count))
        raise ConfigError(f"the device {name!r} is not here; allowed: cpu, {here}")
