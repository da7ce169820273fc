"""The engine's settings: contradictions are refused, and there is one place for them."""

from typing import Any

import pytest
from pydantic import ValidationError

from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.run import RunConfig


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_processes": 2}, "num_processes: 2 needs kind: deepspeed"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer belongs to kind: deepspeed"),
        ({"kind": "deepspeed", "zero_stage": 0, "offload_optimizer": "cpu"}, "needs zero_stage 1, 2 or 3"),
        ({"kind": "deepspeed", "zero_stage": 2, "offload_parameters": "cpu"}, "needs zero_stage 3"),
        ({"kind": "deepspeed", "zero_stage": 3, "offload_optimizer": "nvme"}, "needs nvme_path"),
        ({"kind": "deepspeed", "zero_options": {"stage": 1}}, "zero_options may not hold 'stage'"),
        ({"kind": "deepspeed", "num_nodes": 2}, "needs rendezvous"),
        ({"kind": "deepspeed", "rendezvous": "a:1", "hostfile": "h"}, "either rendezvous"),
        ({"kind": "deepspeed", "rendezvous": "no port"}, "rendezvous"),
        ({"kind": "fsdp"}, "'local' or 'deepspeed'"),
        ({"kind": "deepspeed", "zero_stage": 4}, "less than or equal to 3"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineSettings.model_validate(values)


def test_the_section_reaches_the_training_settings_and_comes_back_once() -> None:
    config = RunConfig.model_validate({"engine": {"kind": "deepspeed", "num_processes": 2}})
    assert config.training.engine.num_processes == 2
    values = config.values()
    assert values["engine"]["num_processes"] == 2 and "engine" not in values["training"]
    assert RunConfig.model_validate(values) == config
    assert RunConfig.model_validate(config.model_dump(exclude_unset=True)) == config


def test_a_second_engine_among_the_training_settings_is_refused() -> None:
    with pytest.raises(ValidationError, match="the engine is set at the top level"):
        RunConfig.model_validate({"training": {"engine": {"kind": "deepspeed"}}})
