"""Optimizer settings and learning-rate schedules."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from comlrl_core.engine.protocol import OptimizerSettings, learning_rate_at
from comlrl_core.errors import ConfigError


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_equal_those_of_transformers(name: Any, warmup: int) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    settings = OptimizerSettings(0.3, lr_schedule=name, lr_warmup_steps=warmup)
    for step in range(11):
        assert learning_rate_at(settings, step, 10) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("gradient_clip", 0.0),
        ("lr_schedule", "cosin"),
        ("lr_warmup_steps", -1),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(field: str, value: Any) -> None:
    values: dict[str, Any] = {"learning_rate": 1e-3, field: value}
    with pytest.raises(ConfigError, match=f"{field} is .*; allowed is"):
        OptimizerSettings(**values)
