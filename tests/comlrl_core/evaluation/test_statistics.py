"""Means, standard errors and win rates, with numbers derived by hand."""

import math

import pytest

from comlrl_core.evaluation.evaluate import EvaluatedSample
from comlrl_core.evaluation.statistics import summarize, wilson_interval, win_rate

ONE_SIGMA = math.erf(1 / math.sqrt(2))  # the confidence whose z is 1


def sample(task: str, index: int, reward: float | None, finished: bool = True, size: int = 3) -> EvaluatedSample:
    return EvaluatedSample(
        task_id=task,
        sample=index,
        reward=reward,
        characters=(size, 2 * size),
        tokens=(size + 1, size),
        finished=(finished, False),
        texts=("a" * size, "b" * 2 * size),
    )


def test_the_task_is_the_unit_of_the_standard_error() -> None:
    """Task means 0.5 and 1: mean 0.75, deviation sqrt(2 x 0.25^2 / 1) = 0.25 sqrt 2, divided by sqrt 2: 0.25.

    The four samples taken as independent have a deviation of 0.5, which divided by sqrt 4 happens to be 0.25 too, so
    a third task is added below: means 0.5, 1, 0 have deviation 0.5, and 0.5 / sqrt 3.
    """
    found = summarize([sample("a", 0, 0.0), sample("a", 1, 1.0), sample("b", 0, 1.0), sample("b", 1, 1.0)])
    assert found["reward_mean"] == 0.75
    assert found["reward_se"] == pytest.approx(0.25)
    assert (found["tasks"], found["samples"], found["dropped"]) == (2, 4, 0)
    more = [sample("a", 0, 0.0), sample("a", 1, 1.0), sample("b", 0, 1.0), sample("c", 0, 0.0)]
    assert summarize(more)["reward_se"] == pytest.approx(0.5 / math.sqrt(3))


def test_tasks_count_alike_whatever_their_number_of_samples() -> None:
    """(0 + 1) / 2 and 1: 0.75, although two of three samples earned 1."""
    assert summarize([sample("a", 0, 0.0), sample("a", 1, 1.0), sample("b", 0, 1.0)])["reward_mean"] == 0.75


def test_a_single_task_and_dropped_samples() -> None:
    found = summarize([sample("a", 0, 0.4), sample("a", 1, None), sample("b", 0, None)])
    assert found["reward_mean"] == 0.4 and found["reward_se"] == 0.0
    assert (found["tasks"], found["samples"], found["dropped"]) == (1, 1, 2)


def test_lengths_and_ends_are_told_per_agent() -> None:
    found = summarize([sample("a", 0, 1.0, finished=True, size=3), sample("a", 1, None, finished=False, size=5)])
    assert (found["agent_1/characters"], found["agent_2/characters"]) == (4, 8)
    assert (found["agent_1/tokens"], found["agent_2/tokens"]) == (5, 4)
    assert (found["agent_1/finished"], found["agent_2/finished"]) == (0.5, 0.0)


def test_nothing_measured_has_no_mean() -> None:
    assert math.isnan(summarize([])["reward_mean"])
    assert math.isnan(summarize([sample("a", 0, None)])["reward_mean"])


@pytest.mark.parametrize(
    ("rate", "count", "expected"),
    [
        # z = 1, n = 3, p = 1/2: centre (1/2 + 1/6) / (4/3) = 1/2; half 3/4 sqrt(1/12 + 1/36) = 3/4 x 1/3
        (0.5, 3, (0.25, 0.75)),
        # z = 1, n = 3, p = 1: centre (1 + 1/6) / (4/3) = 7/8; half 3/4 sqrt(1/36) = 1/8
        (1.0, 3, (0.75, 1.0)),
        # z = 1, n = 1, p = 0: centre (1/2) / 2 = 1/4; half 1/2 sqrt(1/4) = 1/4
        (0.0, 1, (0.0, 0.5)),
        # z = 1, n = 8, p = 1/2: centre 1/2; half 8/9 sqrt(1/32 + 1/256) = 8/9 x 3/16 = 1/6
        (0.5, 8, (1 / 3, 2 / 3)),
    ],
)
def test_wilsons_interval(rate: float, count: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(rate, count, ONE_SIGMA) == pytest.approx(expected)


def test_wilsons_interval_at_95_percent() -> None:
    """z^2 = 3.8415, n = 10, p = 1: the lower end is n / (n + z^2) = 10 / 13.8415."""
    low, high = wilson_interval(1.0, 10, 0.95)
    assert low == pytest.approx(10 / 13.8415, abs=1e-5) and high == 1.0


def test_win_rate_with_ties() -> None:
    """Task a: a win and a tie, 0.75. Task b: a loss and a tie, 0.25. Together 0.5 from two tasks.

    z = 1, n = 2: centre 1/2; half 2/3 sqrt(1/8 + 1/16) = 2/3 x sqrt(3)/4 = sqrt(3)/6.
    """
    ours = [sample("a", 0, 1.0), sample("a", 1, 0.5), sample("b", 0, 0.1), sample("b", 1, 0.2)]
    theirs = [sample("b", 1, 0.2), sample("b", 0, 0.3), sample("a", 1, 0.5), sample("a", 0, 0.9)]
    found = win_rate(ours, theirs, ONE_SIGMA)
    assert (found.rate, found.tasks) == (0.5, 2)
    assert (found.low, found.high) == pytest.approx((0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6))


def test_win_rate_compares_what_both_sides_have() -> None:
    ours = [sample("a", 0, 1.0), sample("a", 1, None), sample("c", 0, 1.0)]
    theirs = [sample("a", 0, 0.0), sample("a", 1, 5.0), sample("b", 0, 5.0)]
    found = win_rate(ours, theirs)
    assert (found.rate, found.tasks, found.high) == (1.0, 1, 1.0)
    assert found.low < 0.3  # one task says little


def test_a_win_rate_of_nothing_is_unknown() -> None:
    found = win_rate([], [sample("a", 0, 1.0)])
    assert math.isnan(found.rate) and (found.low, found.high, found.tasks) == (0.0, 1.0, 0)
