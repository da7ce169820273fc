"""Targets, value losses and baselines by hand."""

import math

import pytest
import torch

from comlrl_core.rl.values import clipped_value_loss, explained_variance, mean_of_others, td_targets, value_loss


def of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_targets_by_hand() -> None:
    """1 + 0.5 * 4; the last turn and a stopped one are worth their reward, whatever the next value says."""
    found = td_targets(of(1, 2, 3), of(4, math.nan, 7), torch.tensor([True, False, False]), 0.5)
    assert found.tolist() == [3.0, 2.0, 3.0]


def test_no_gradient_flows_into_targets() -> None:
    following = of(4).requires_grad_()
    assert not td_targets(of(1), following, torch.tensor([True]), 1.0).requires_grad
    values, targets = of(2).requires_grad_(), of(5).requires_grad_()
    value_loss(values, targets).sum().backward()
    assert values.grad is not None and values.grad.item() == -6.0 and targets.grad is None


def test_clipped_loss_by_hand() -> None:
    """Old 0, target 1, range 0.2.

    V = 0.5: (0.5 - 1)^2 = 0.25 against (0.2 - 1)^2 = 0.64, which has no slope in V.
    V = -0.5: 2.25 against (-0.2 - 1)^2 = 1.44: the unclipped one, with slope 2 (V - 1) = -3.
    V = 0.1: both 0.81, inside of the range.
    """
    values = of(0.5, -0.5, 0.1).requires_grad_()
    losses = clipped_value_loss(values, of(0, 0, 0), of(1, 1, 1), 0.2)
    assert losses.tolist() == pytest.approx([0.64, 2.25, 0.81], abs=1e-12)
    losses.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, -3.0, -1.8], abs=1e-12)


@pytest.mark.parametrize("clip_range", [0.0, -1.0])
def test_a_range_below_zero_is_refused(clip_range: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        clipped_value_loss(of(1), of(1), of(1), clip_range)


def test_mean_of_others_by_hand() -> None:
    """1, 2, 6: others' means 4, 3.5, 1.5. Without the 6: 2 and 1. Alone: nothing to compare with."""
    values = torch.stack([of(1, 2, 6), of(1, 2, 6), of(1, 2, 6)])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    found = mean_of_others(values, valid)
    assert found[0].tolist() == [4.0, 3.5, 1.5]
    assert found[1, :2].tolist() == [2.0, 1.0]
    assert found[2, 0].item() == 0.0


def test_explained_variance_by_hand() -> None:
    """Targets 0, 2, 4 vary by 8/3. A perfect critic, a constant one, one that is off by a constant, an inverted one."""
    targets = of(0, 2, 4)
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(of(9, 9, 9), targets) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(targets + 5, targets) == pytest.approx(1.0, abs=1e-12)
    assert explained_variance(of(4, 2, 0), targets) == pytest.approx(-3.0, abs=1e-12)
    assert math.isnan(explained_variance(of(1, 2), of(3, 3)))
