"""Devices that are not there are refused by name, whoever asks for them."""

import pytest
import torch

from comlrl_core.algorithms.madpo_config import MADPOIterConfig
from comlrl_core.config.devices import DEVICE_FIELDS, check_device, check_devices, named_devices
from comlrl_core.errors import ConfigError


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "auto"])
def test_what_is_always_here(name: str) -> None:
    check_device(name)


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:-1", "cpu:1", ""])
def test_what_no_machine_has(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no device .* allowed: cpu, cuda"):
        check_device(name)


def test_a_gpu_that_is_not_here() -> None:
    here = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=r"'cuda:99' is not here.*allowed: cpu" + (", cuda:0" if here else "")):
        check_device("cuda:99")


def test_the_setting_is_named() -> None:
    settings = MADPOIterConfig(agent_devices=["cpu", "cuda:99"], reference_devices="cpu")
    assert dict(named_devices(settings)) == {"agent_devices": ["cpu", "cuda:99"], "reference_devices": ["cpu"]}
    assert set(dict(named_devices(settings))) < set(DEVICE_FIELDS)
    with pytest.raises(ConfigError, match=r"^agent_devices: the device 'cuda:99' is not here"):
        check_devices(settings)
