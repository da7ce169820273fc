"""Preference losses by hand, and against TRL where its definition is the same."""

import math
from types import SimpleNamespace

import pytest
import torch

from comlrl_core.rl.preference import LossType, preference_accuracy, preference_loss

MARGIN = torch.tensor([0.0, 10.0, -10.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # beta D = 0, 1, -1: ln 2; ln(1 + e^-1); ln(1 + e)
        ("sigmoid", [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.e)]),
        # 1 - beta D: 1, 0, 2
        ("hinge", [1.0, 0.0, 2.0]),
        # 1 / (2 beta) = 5: (0 - 5)^2, (10 - 5)^2, (-10 - 5)^2
        ("ipo", [25.0, 25.0, 225.0]),
    ],
)
def test_by_hand(loss_type: LossType, expected: list[float]) -> None:
    """beta = 0.1, margins 0, 10 and -10; smoothing 0.2 mixes 0.8 of the loss with 0.2 of its mirror."""
    found = preference_loss(MARGIN, 0.1, loss_type)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    mirrored = [expected[0], expected[2], expected[1]]
    smoothed = [0.8 * a + 0.2 * b for a, b in zip(expected, mirrored, strict=True)]
    assert preference_loss(MARGIN, 0.1, loss_type, 0.2).tolist() == pytest.approx(smoothed, abs=1e-12)


def test_gradient_by_hand() -> None:
    """d/dD of -log sigmoid(beta D) is -beta sigmoid(-beta D): at beta D = ln 3 it is -beta / 4."""
    margin = torch.tensor([math.log(3.0) / 0.5], dtype=torch.float64, requires_grad=True)
    preference_loss(margin, 0.5).sum().backward()
    assert margin.grad is not None
    assert margin.grad.item() == pytest.approx(-0.125, abs=1e-12)


def test_far_margins_do_not_overflow() -> None:
    """-log sigmoid(-1e4) = 1e4, not -log(0) = inf; its slope is -beta."""
    margin = torch.tensor([-1e5, 1e5], requires_grad=True)
    loss = preference_loss(margin, 0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([1e4, 0.0])
    assert margin.grad is not None
    assert margin.grad.tolist() == pytest.approx([-0.1, 0.0])


def test_accuracy_counts_margins_above_zero() -> None:
    assert preference_accuracy(MARGIN).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"beta": 0.1, "loss_type": "sigmod"}, "sigmoid, ipo, hinge"),
        ({"beta": 0.1, "label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_loss(MARGIN, **settings)


@pytest.mark.slow  # importing TRL takes several seconds
@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)])
def test_equals_trl_cpo_loss(loss_type: LossType, smoothing: float) -> None:
    """CPO without its likelihood term is our loss of `chosen - rejected`."""
    trainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    stub = SimpleNamespace(
        beta=0.3,
        loss_type=loss_type,
        label_smoothing=smoothing,
        simpo_gamma=0.0,
        cpo_alpha=0.0,
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    chosen, rejected = -torch.rand(2, 6, generator=torch.Generator().manual_seed(3)).double() * 20
    expected = trainer.cpo_loss(stub, chosen, rejected)[0]
    torch.testing.assert_close(
        preference_loss(chosen - rejected, 0.3, loss_type, smoothing), expected, rtol=0, atol=1e-9
    )
