"""What an algorithm may ask of the thing that trains a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

from torch import Tensor, nn

from comlrl_core.errors import ConfigError

Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine"]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101), gradient clipping and the learning-rate schedule.

    Raises:
        ConfigError: a value is out of bounds.
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    gradient_clip: float | None = 1.0  # largest norm of the gradient of one engine; None = not clipped
    lr_schedule: Schedule = "constant"
    lr_warmup_steps: int = 0

    def __post_init__(self) -> None:
        checks = {
            "learning_rate": (
                math.isfinite(self.learning_rate) and self.learning_rate >= 0,
                "a finite number >= 0",
            ),
            "weight_decay": (
                math.isfinite(self.weight_decay) and self.weight_decay >= 0,
                "a finite number >= 0",
            ),
            "beta1": (0 <= self.beta1 < 1, "in [0, 1)"),
            "beta2": (0 <= self.beta2 < 1, "in [0, 1)"),
            "epsilon": (math.isfinite(self.epsilon) and self.epsilon > 0, "a finite number > 0"),
            "gradient_clip": (self.gradient_clip is None or self.gradient_clip > 0, "None or a number > 0"),
            "lr_schedule": (
                self.lr_schedule in get_args(Schedule),
                f"one of {', '.join(get_args(Schedule))}",
            ),
            "lr_warmup_steps": (self.lr_warmup_steps >= 0, "an integer >= 0"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed is {allowed}")


class StepResult(NamedTuple):
    """One optimizer step.

    `grad_norm` is the one before clipping, `learning_rate` the one that was used; `skipped` means that the
    step was left out because the gradient was not finite.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool


class Engine(Protocol):
    """Trains one model. Agents that share a model share its engine."""

    @property
    def model(self) -> nn.Module:
        """The module to call: a wrapper of the agent's model where the engine needs one."""
        ...

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies a loss by: gradients that it leaves outside the model are as much too large."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`; any number of calls before a step (micro-batches, several agents)."""
        ...

    def step(self) -> StepResult:
        """Clips the accumulated gradient, steps the optimizer and the schedule, forgets the gradient."""
        ...

    def zero_grad(self) -> None:
        """Forgets the accumulated gradient."""
        ...

    def begin(self, total_steps: int) -> None:
        """Restarts the learning-rate schedule over `total_steps`; the optimizer's moments stay."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes all that training needs besides the model's own checkpoint: moments, masters, schedule."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restores what `save_state` wrote, bit for bit, for a model with the weights of that moment."""
        ...


def agents_by_engine(engines: Sequence[Engine]) -> list[tuple[Engine, list[int]]]:
    """Each engine once, with the agents that it trains, in agent order."""
    groups: dict[int, tuple[Engine, list[int]]] = {}
    for agent, engine in enumerate(engines):
        groups.setdefault(id(engine), (engine, []))[1].append(agent)
    return list(groups.values())


def learning_rate_at(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`: the schedules of `transformers.get_scheduler`.

    A pure function, so that a schedule has no state but its step. After the last step the decaying ones stay
    at 0.
    """
    warmup = settings.lr_warmup_steps
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    if step < warmup:
        return settings.learning_rate * step / max(1, warmup)
    if settings.lr_schedule == "constant_with_warmup":
        return settings.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if settings.lr_schedule == "linear":
        return settings.learning_rate * (1.0 - progress)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
