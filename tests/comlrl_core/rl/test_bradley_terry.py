"""Bradley-Terry by hand."""

import math

import pytest
import torch

from comlrl_core.rl.bradley_terry import bradley_terry_accuracy, bradley_terry_loss

WINNERS = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
LOSERS = torch.tensor([1.0, -math.log(3.0), 1.0], dtype=torch.float64)


def test_by_hand() -> None:
    """Margins 0, ln 3 and -3: ln 2; -ln(3/4); ln(1 + e^3)."""
    expected = [math.log(2), -math.log(0.75), math.log1p(math.exp(3))]
    assert bradley_terry_loss(WINNERS, LOSERS).tolist() == pytest.approx(expected, abs=1e-12)


def test_centering_by_hand() -> None:
    """0.1 * (r_w + r_l)^2: sums 2, -ln 3 and -1."""
    extra = bradley_terry_loss(WINNERS, LOSERS, 0.1) - bradley_terry_loss(WINNERS, LOSERS)
    assert extra.tolist() == pytest.approx([0.4, 0.1 * math.log(3) ** 2, 0.1], abs=1e-12)


def test_gradient_by_hand() -> None:
    """d/dr_w = -sigmoid(-(r_w - r_l)): at a margin of ln 3 it is -1/4, and +1/4 for the loser."""
    winners = torch.tensor([math.log(3.0)], dtype=torch.float64, requires_grad=True)
    losers = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(winners, losers).sum().backward()
    assert winners.grad is not None and losers.grad is not None
    assert winners.grad.item() == pytest.approx(-0.25, abs=1e-12)
    assert losers.grad.item() == pytest.approx(0.25, abs=1e-12)


def test_log_of_sigmoid_overflows() -> None:
    """log(sigmoid(-200)) is log(0) in fp32; logsigmoid is -200, with a slope of 1."""
    losers = torch.tensor([200.0], requires_grad=True)
    loss = bradley_terry_loss(torch.zeros(1), losers)
    loss.sum().backward()
    assert loss.item() == pytest.approx(200.0)
    assert losers.grad is not None and losers.grad.item() == pytest.approx(1.0)


def test_half_precision_scores_are_compared_in_fp32() -> None:
    loss = bradley_terry_loss(torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0.25], dtype=torch.bfloat16))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.25)), abs=1e-6)


def test_accuracy_counts_equal_scores_as_one_half() -> None:
    assert bradley_terry_accuracy(WINNERS, LOSERS).tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("coefficient", [-0.1, math.nan])
def test_refuses_a_coefficient_below_zero(coefficient: float) -> None:
    with pytest.raises(ValueError, match="center_rewards_coef"):
        bradley_terry_loss(WINNERS, LOSERS, coefficient)
