"""A tiny team, two tasks, and a scorer that gives the numbers that a test wants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from comlrl_core.rewards.contract import Scored
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team, load_team

torch.set_num_threads(1)

TASKS = [
    {"task_id": "a", "prompt": "the red bird sings.", "topic": "birds"},
    {"task_id": "b", "prompt": "an old road.", "topic": "roads"},
]


class NumberedScorer:
    """Gives the next numbers of a list (None: dropped), and remembers what it was asked."""

    def __init__(self, numbers: Sequence[float | None]) -> None:
        self.numbers = list(numbers)
        self.calls: list[dict[str, Any]] = []

    def score(
        self,
        completions: Sequence[Sequence[str]],
        batch_items: Sequence[Mapping[str, Any]],
        prompts: Sequence[str | Sequence[str]],
    ) -> list[Scored]:
        self.calls.append({"completions": completions, "batch_items": list(batch_items), "prompts": list(prompts)})
        taken, self.numbers = self.numbers[: len(batch_items)], self.numbers[len(batch_items) :]
        return [Scored(number, number, dropped=number is None) for number in taken]


@pytest.fixture(scope="session")
def team() -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, formatters=["[1] {prompt}\n", "[2] {prompt}\n"])


@pytest.fixture
def tasks() -> list[dict[str, Any]]:
    return [dict(row) for row in TASKS]


@pytest.fixture
def sampling() -> Sampling:
    return Sampling(max_new_tokens=4)


@pytest.fixture
def scorer() -> Callable[[Sequence[float | None]], NumberedScorer]:
    return NumberedScorer


@pytest.fixture
def echo() -> Callable[..., list[str]]:
    """A transition that writes each agent's last answer behind the task's prompt."""

    def transition(
        prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None
    ):
        return [f"{prompt} {text}" for text in agent_completions]

    return transition
