"""The reward contract: what is passed, what is accepted, what is refused."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from comlrl_core.errors import ConfigError, RewardError
from comlrl_core.rewards.contract import Oracle, Scored, to_float

ITEMS = [{"task_id": "t0", "target": 3}, {"task_id": "t1", "target": 4}]
TEXTS = [["a", "b"], ["c", "d"]]
PROMPTS = ["p0", "p1"]


def score(func: Any, **options: Any) -> list[Scored]:
    return Oracle(func, 2, **options).score(TEXTS, ITEMS, PROMPTS)


def raising(value: Any) -> Any:
    return lambda first, second: [value, 1.0]


def test_keywords_are_passed_only_where_they_are_named() -> None:
    seen: list[Any] = []

    def plain(first, second):
        seen.append((first, second))
        return [1, 2]

    def items(first, second, batch_items):
        seen.append(batch_items)
        return [1, 2]

    def both(*completions, prompts=None, batch_items=None):
        seen.append((len(completions), prompts, batch_items))
        return [1, 2]

    def anything(*completions, **kwargs):
        seen.append(sorted(kwargs))
        return [1, 2]

    for func in (plain, items, both, anything):
        assert [s.raw for s in score(func)] == [1.0, 2.0]
    assert seen == [(["a", "b"], ["c", "d"]), ITEMS, (2, PROMPTS, ITEMS), ["batch_items", "prompts"]]


def test_partials_and_objects_are_functions_too() -> None:
    class Judge:
        def __call__(self, first, second, *, prompts):
            return [len(prompt) for prompt in prompts]

    def scaled(first, second, *, factor):
        return [factor, factor]

    assert [s.raw for s in score(Judge())] == [2.0, 2.0]
    assert [s.raw for s in score(functools.partial(scaled, factor=3))] == [3.0, 3.0]
    assert Oracle(Judge(), 2).name == "Judge"
    assert Oracle(functools.partial(scaled, factor=3), 2).name == "scaled"


@pytest.mark.parametrize(
    "func",
    [
        lambda only: [0.0],
        lambda first, second, third: [0.0],
        lambda first, batch_items: [0.0],  # the second list would land in batch_items
        lambda first, second, *, extra: [0.0],
    ],
)
def test_a_function_that_cannot_take_the_lists_is_refused_before_anything_runs(func: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be called with 2 list\(s\)"):
        Oracle(func, 2)


def test_other_things_that_are_refused_at_once() -> None:
    async def later(first, second):
        return [0.0]

    with pytest.raises(ConfigError, match="asynchronous"):
        Oracle(later, 2)
    with pytest.raises(ConfigError, match="a str cannot be called"):
        Oracle("length_ratio", 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_bad_reward: 'skip' is unknown; allowed: fail, drop"):
        Oracle(lambda a, b: [], 2, on_bad_reward="skip")  # type: ignore[arg-type]


def test_an_exception_inside_is_passed_on_once_with_function_and_tasks() -> None:
    """A TypeError raised inside must not be taken for a wrong signature and answered with another call."""
    calls = []

    def broken(first, second, batch_items=None):
        calls.append(1)
        raise TypeError("unexpected keyword argument 'batch_items'")

    with pytest.raises(RewardError, match=r"function broken raised TypeError: unexpected .*\(tasks t0, t1\)") as error:
        score(broken)
    assert isinstance(error.value.__cause__, TypeError)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 rewards for 2 joint responses"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 joint responses"),
        (1.0, "returned a float"),
        (None, "returned a NoneType"),
        ("12", "returned a str"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ([1.0, "0.5"], "returned '0.5' for task t1; a reward must be a number"),
        ([[1.0], 1.0], r"returned \[1.0\] for task t0"),
        ([1.0, 1j], "for task t1"),
    ],
)
@pytest.mark.parametrize("mode", ["fail", "drop"])
def test_a_wrong_shape_or_type_names_function_and_task(result: Any, message: str, mode: Any) -> None:
    with pytest.raises(RewardError, match=f"judge {message}" if message.startswith("returned") else message) as error:
        score(lambda first, second: result, name="judge", on_bad_reward=mode)
    assert "t0" in str(error.value) or "t1" in str(error.value)


@pytest.mark.parametrize(
    "result",
    [
        (1, True),
        np.array([1.0, 1.0]),
        np.array([1, 1]),
        torch.tensor([1.0, 1.0], requires_grad=True),
        [torch.tensor(1.0), np.float32(1.0)],
        [np.int64(1), np.bool_(True)],
    ],
)
def test_numbers_of_every_library_are_numbers(result: Any) -> None:
    scored = score(lambda first, second: result)
    assert scored == [Scored(1.0, 1.0), Scored(1.0, 1.0)]
    assert all(type(s.raw) is float for s in scored)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, torch.tensor(math.nan), 10**400])
def test_one_bad_reward_fails_or_is_dropped_alone(bad: Any) -> None:
    """Pitfall 13: the other joint response of the batch keeps its reward."""
    with pytest.raises(RewardError, match="for task t0; a reward must be finite"):
        score(raising(bad))
    assert score(raising(bad), on_bad_reward="drop") == [Scored(None, None, True), Scored(1.0, 1.0)]


def test_the_processor_comes_after_and_both_numbers_are_kept() -> None:
    """2 * r - 1 of 0.25 and 0.75 is -0.5 and 0.5."""
    scored = score(lambda first, second: [0.25, 0.75], processor=lambda r: 2 * r - 1)
    assert scored == [Scored(0.25, -0.5), Scored(0.75, 0.5)]


def test_a_processor_can_be_bad_too() -> None:
    def rewards(first, second):
        return [0.0, 4.0]

    def inverse(reward):
        return math.inf if reward == 0 else 1 / reward

    with pytest.raises(RewardError, match="reward processor inverse returned inf for task t0"):
        score(rewards, processor=inverse)
    assert score(rewards, processor=inverse, on_bad_reward="drop") == [
        Scored(0.0, None, True),
        Scored(4.0, 0.25),
    ]
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError for 0.0: .*\(task t0\)"):
        score(rewards, processor=lambda reward: 1 / reward)


def test_what_a_function_does_to_its_arguments_stays_there() -> None:
    def greedy(first, second, batch_items):
        first.clear()
        batch_items[0].pop("target")
        return [0, 0]

    score(greedy)
    assert TEXTS == [["a", "b"], ["c", "d"]] and ITEMS[0] == {"task_id": "t0", "target": 3}


def test_nothing_to_score_needs_no_call() -> None:
    assert Oracle(lambda a, b: 1 / 0, 2).score([[], []], [], []) == []


def test_the_label_names_the_version() -> None:
    assert Oracle(lambda a, b: [], 2, name="judge", version="12ab").label == "judge@12ab"
    assert Oracle(lambda a, b: [], 2, name="judge").label == "judge"


def test_to_float_refuses_words() -> None:
    assert [to_float(x) for x in ("1", b"1", [], {}, np.array([1.0]), object())] == [None] * 6
