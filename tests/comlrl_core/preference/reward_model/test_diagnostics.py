"""Held-out share, calibration, rank correlation and the alarm, by hand."""

import math

import pytest
import torch

from comlrl_core.preference.reward_model.diagnostics import (
    ProbeSample,
    calibration_error,
    changes,
    exploitation_warning,
    held_out,
    held_out_metrics,
    is_held_out,
    probe_metrics,
    rank_correlation,
)


def test_held_out_share_is_a_function_of_the_task_id_alone() -> None:
    tasks = [f"task-{number}" for number in range(2000)]
    share = [task for task in tasks if is_held_out(task, 0.1)]
    assert 150 < len(share) < 250
    assert share == [task for task in tasks if is_held_out(task, 0.1)]
    assert set(share) <= {task for task in tasks if is_held_out(task, 0.2)}  # a larger share holds the smaller one
    assert not any(is_held_out(task, 0.0) for task in tasks)


def test_held_out_by_hand() -> None:
    """Margins ln 3 and -ln 3: one right; loss (-ln 3/4 - ln 1/4) / 2; both sure of 3/4, right half the time: 1/4."""
    found = held_out(torch.tensor([math.log(3), 0.0]), torch.tensor([0.0, math.log(3)]))
    assert found is not None
    assert (found.pairs, found.accuracy) == (2, 0.5)
    assert found.margin == pytest.approx(0.0, abs=1e-7)
    assert found.loss == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2, abs=1e-6)
    assert found.ece == pytest.approx(0.25, abs=1e-6)


def test_calibration_by_hand() -> None:
    """Probabilities 0.6, 0.6 (one right: |1/2 - 0.6|) and 0.99 (right: |1 - 0.99|): (2 * 0.1 + 0.01) / 3."""
    margins = torch.tensor([math.log(1.5), -math.log(1.5), math.log(99)])
    assert calibration_error(margins) == pytest.approx(0.07, abs=1e-6)
    assert calibration_error(torch.tensor([200.0])) == 0.0  # a probability of exactly 1 lies in the last bin


def test_nothing_held_out_is_nothing_measured() -> None:
    assert held_out(torch.empty(0), torch.empty(0)) is None
    assert held_out_metrics(None) == {"heldout_pairs": 0.0}


def test_rank_correlation_by_hand() -> None:
    """Ranks 1 2 3 against 1 3 2: 1 - 6 * 2 / (3 * 8) = 1/2."""
    assert rank_correlation([0.1, 0.2, 0.9], [1.0, 9.0, 2.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 10.0, 1000.0]) == pytest.approx(1.0)
    # Ties share 2.5: centred ranks (-1.5, 0, 0, 1.5) against (-1.5, -.5, .5, 1.5): 4.5 / sqrt(4.5 * 5).
    assert rank_correlation([0.0, 1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0], [1.0]) is None


def probe(learned: float, oracle: float) -> list[ProbeSample]:
    """Eight tasks of two samples around the given means."""
    return [
        ProbeSample(f"t{task}", sample, learned + 0.01 * task + sample, oracle + 0.02 * (task % 3) - sample)
        for task in range(8)
        for sample in range(2)
    ]


def test_good_pair_accuracy_while_the_policy_exploits_the_reward_model() -> None:
    warning = exploitation_warning(probe(0.0, 0.6), probe(1.0, 0.3))
    assert warning is not None
    assert "rose by 1 while the task reward fell by 0.3" in warning
    assert exploitation_warning(probe(0.0, 0.6), probe(1.0, 0.7)) is None  # both rise
    assert exploitation_warning(probe(0.0, 0.6), probe(-1.0, 0.3)) is None  # both fall
    assert exploitation_warning(probe(0.0, 0.6), probe(0.0, 0.6)) is None
    assert exploitation_warning(probe(0.0, 0.6), []) is None


def test_a_change_within_two_standard_errors_is_no_alarm() -> None:
    """Task differences +1 and -0.9: mean 0.05, standard error 0.95."""
    before = [ProbeSample("a", 0, 0.0, 0.0), ProbeSample("b", 0, 0.0, 0.0)]
    after = [ProbeSample("a", 0, 1.0, -1.0), ProbeSample("b", 0, -0.9, 0.9)]
    found = changes(before, after)
    assert found is not None
    assert found[0].mean == pytest.approx(0.05)
    assert found[0].standard_error == pytest.approx(0.95)
    assert exploitation_warning(before, after) is None
    assert exploitation_warning(before[:1], after[:1]) is None  # one task has no standard error


def test_probe_metrics_by_hand() -> None:
    found = probe_metrics([ProbeSample("a", 0, 1.0, 0.2), ProbeSample("b", 0, 3.0, 0.4)])
    assert found == {
        "samples": 2.0,
        "learned_reward_mean": 2.0,
        "oracle_reward_mean": pytest.approx(0.3),
        "rank_correlation": pytest.approx(1.0),
    }
    assert "rank_correlation" not in probe_metrics([ProbeSample("a", 0, 1.0, 0.2)])
    assert probe_metrics([]) == {}
