"""What every algorithm takes from its settings and leaves beside its weights: engines, sampling, training state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from comlrl_core.config.engine import EngineSettings
from comlrl_core.engine.build import build_engines
from comlrl_core.engine.processes import is_first, wait_for_all
from comlrl_core.engine.protocol import Engine, OptimizerSettings, Schedule
from comlrl_core.files import write_json, write_jsonl
from comlrl_core.store import PROGRESS, read_progress
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team

Metrics = dict[str, Any]

UPDATES = "updates.jsonl"
NONFINITE_LIMIT = 3  # non-finite batches in a row that end a run although each may be skipped


@dataclass(frozen=True)
class Learned:
    """What an update did: the metrics of each optimizer step, and the environment steps trained so far."""

    history: list[Metrics]
    environment_steps: int


class SamplingConfig(Protocol):
    """The settings that `sampling` reads."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None


class OptimizationConfig(Protocol):
    """The settings that `make_engines` and the training state read."""

    agent_learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    gradient_clip: float | None
    lr_schedule: Schedule
    lr_warmup_steps: int
    optimizer_state: Literal["carry", "reset"]
    engine: EngineSettings


def sampling(config: SamplingConfig) -> Sampling:
    """How this run samples its training answers."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def make_engines(team: Team, config: OptimizationConfig) -> list[Engine]:
    """One engine per agent (one for all agents that share a model), with fresh optimizer moments."""
    return build_engines(team.models, optimizer_settings(config), config.engine)


def optimizer_settings(config: OptimizationConfig) -> OptimizerSettings:
    """How the agents are optimised."""
    return OptimizerSettings(
        learning_rate=config.agent_learning_rate,
        weight_decay=config.weight_decay,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        gradient_clip=config.gradient_clip,
        lr_schedule=config.lr_schedule,
        lr_warmup_steps=config.lr_warmup_steps,
    )


def save_training_state(
    folder: Path,
    engines: Sequence[Engine],
    config: OptimizationConfig,
    iteration: int,
    learned: Learned,
    critic_engines: Sequence[Engine] = (),
) -> None:
    """Write what the next iteration needs beside the weights: optimizer moments where they carry over, and counters.

    Of several processes, all have to call it, and the first writes.
    """
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
    wait_for_all()
    if config.optimizer_state == "carry":
        for name, engine in _named(engines, critic_engines):
            engine.save_state(folder / name)
    if not is_first():
        return
    write_jsonl(folder / UPDATES, [_finite(metrics) for metrics in learned.history])
    write_json(folder / PROGRESS, {"iteration": iteration, "environment_steps": learned.environment_steps}, indent=2)


def load_training_state(
    folder: Path, engines: Sequence[Engine], config: OptimizationConfig, critic_engines: Sequence[Engine] = ()
) -> int:
    """Restore what `save_training_state` wrote into fresh `engines`; returns the environment steps trained so far."""
    if config.optimizer_state == "carry":
        for name, engine in _named(engines, critic_engines):
            saved = folder / name
            if saved.is_dir():  # the initial state has no moments
                engine.load_state(saved)
    return read_progress(folder)


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON has no NaN; what a skipped update could not measure becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def _named(engines: Sequence[Engine], critic_engines: Sequence[Engine]) -> list[tuple[str, Engine]]:
    """Each engine once with the name of its folder: that of the first agent that it trains, or of its critic."""
    first: dict[int, tuple[str, Engine]] = {}
    for index, engine in enumerate(engines):
        first.setdefault(id(engine), (f"engine_{index}", engine))
    return [*first.values(), *((f"engine_critic_{index}", engine) for index, engine in enumerate(critic_engines))]


def training_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """One optimizer step under the names that people compare runs by."""
    preference = ("margin", "accuracy", "winner_logps", "loser_logps")
    counters = ("epoch", "iteration", "step", "environment_steps")
    metrics = {}
    for key, value in row.items():
        if key in counters or not isinstance(value, int | float):
            continue
        group = "preference" if key in preference or (key.startswith("agent_") and "margin" in row) else "train"
        metrics[key if "/" in key and not key.startswith("agent_") else f"{group}/{key}"] = float(value)
    return metrics
