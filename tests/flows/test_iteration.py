from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import iteration
from flows.iteration import iterate

CONFIG = SimpleNamespace(learns_from_rewards=lambda: False, fits_reward_model=lambda: False)
JOB: Any = SimpleNamespace(source_root=Path("project"), config=CONFIG)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    def call(step: Any, job: Any, *rest: Any) -> Any:
        assert job is JOB
        assert cleared == [rest[0]]
        made.append((step.name, *rest))
        return {"eval/reward_mean": 0.5}

    cleared: list[int] = []
    monkeypatch.setattr(iteration, "call", call)
    monkeypatch.setattr(iteration, "clear_before", lambda job, number: cleared.append(number))
    monkeypatch.setattr(iteration, "num_chunks", lambda job: 2)
    return made


def test_the_stages_of_an_iteration_in_order(calls: list[tuple[Any, ...]]) -> None:
    """Each chunk is scored before the next is sampled: a kill loses one chunk at most."""
    assert iterate.fn(JOB, 3) == {"eval/reward_mean": 0.5}
    assert calls == [
        ("collect", 3, 0),
        ("score", 3, 0),
        ("collect", 3, 1),
        ("score", 3, 1),
        ("pair", 3),
        ("sample", 3),
        ("update", 3),
        ("publish", 3),
        ("evaluate", 3),
    ]


def test_the_subflow_is_named_after_its_iteration() -> None:
    assert iterate.name == "iteration"
    assert isinstance(iterate.flow_run_name, str)
    assert iterate.flow_run_name.format(iteration=3) == "iteration-0003"
    assert not iterate.retries
