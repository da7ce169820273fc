"""Trainers of a size for tests: two tiny agents, three short tasks, a few tokens."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_core import notices
from comlrl_core.trainers import reinforce
from comlrl_core.trainers.preference import MADPOConfig, MADPOIterConfig, MADPOIterTrainer, MADPOTrainer

torch.set_num_threads(1)

TASKS = [{"prompt": f"the {word} bird sings."} for word in ("red", "old", "small")]
HELD_OUT = [{"prompt": f"a {word} song."} for word in ("slow", "warm")]

Make = Callable[..., Any]


def length_ratio_reward(first: list[str], second: list[str]) -> list[float]:
    """The second text should be 2.5 times as long as the first."""
    return [math.exp(-abs(len(b) / max(1, len(a)) - 2.5)) for a, b in zip(first, second, strict=True)]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Every notice may be said again, and folders that nobody named stay among those of the tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("unnamed")))
    notices.forget()
    yield
    notices.forget()


@pytest.fixture
def settings() -> Callable[..., dict[str, Any]]:
    """Settings for tests, with changes."""

    def of(**changes: Any) -> dict[str, Any]:
        return {
            "max_new_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "preference_num_candidates": 4,
            "preference_pairs_per_sample": 3,
            "agent_learning_rate": 1e-3,
            "rollout_buffer_size": 4,
            "eval_interval": 0,
            **changes,
        }

    return of


def _arguments(changes: dict[str, Any]) -> dict[str, Any]:
    given = {
        "agent_model": None if "agents" in changes else "builtin:tiny",
        "reward_func": length_ratio_reward,
        "train_dataset": TASKS,
        "formatters": "{prompt}\n",
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


@pytest.fixture
def make_iterative(settings, tmp_path: Path) -> Make:
    """`make_iterative(args={...}, **arguments)`: a `MADPOIterTrainer` of two iterations."""

    def make(args: dict[str, Any] | None = None, **arguments: Any) -> MADPOIterTrainer:
        chosen = settings(**{"num_iterations": 2, "preference_replay_dir": str(tmp_path / "replay"), **(args or {})})
        return MADPOIterTrainer(args=MADPOIterConfig(**chosen), **_arguments(arguments))

    return make


@pytest.fixture
def make_offline(settings) -> Make:
    """`make_offline(args={...}, **arguments)`: a `MADPOTrainer` of two epochs."""

    def make(args: dict[str, Any] | None = None, **arguments: Any) -> MADPOTrainer:
        chosen = settings(**{"num_train_epochs": 2, **(args or {})})
        return MADPOTrainer(args=MADPOConfig(**chosen), **_arguments(arguments))

    return make


@pytest.fixture
def make_reinforce(tmp_path: Path) -> Make:
    """`make_reinforce(args={...}, kind="MAGRPO", **arguments)`: a trainer of the REINFORCE family, two epochs."""

    def make(args: dict[str, Any] | None = None, kind: str = "MAGRPO", **arguments: Any) -> reinforce.MAGRPOTrainer:
        chosen = {
            "num_train_epochs": 2,
            "num_turns": 1,
            "num_generations": 3,
            "max_new_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "agent_learning_rate": 1e-3,
            "early_termination_threshold": None,
            "eval_interval": 0,
            **(args or {}),
        }
        config = getattr(reinforce, f"{kind}Config")(**chosen)
        return getattr(reinforce, f"{kind}Trainer")(args=config, **_arguments(arguments))

    return make


@pytest.fixture
def tasks() -> list[dict[str, str]]:
    return [dict(row) for row in TASKS]


@pytest.fixture
def held_out() -> list[dict[str, str]]:
    return [dict(row) for row in HELD_OUT]


@pytest.fixture
def reward() -> Callable[..., list[float]]:
    return length_ratio_reward
