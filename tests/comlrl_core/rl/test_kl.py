"""The sampled divergence, by hand."""

import math

import pytest
import torch

from comlrl_core.rl.kl import sequence_kl


def test_by_hand() -> None:
    """d = log ref - log pi: ln 2 gives 2 - ln 2 - 1; -ln 2 gives 1/2 + ln 2 - 1; their sum is 1/2.

    The third token lies outside of the mask and may be anything.
    """
    own = torch.tensor([[-3.0, -1.0, 7.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    reference = torch.tensor([[-3.0 + math.log(2), -1.0 - math.log(2), math.nan], [-1.0, -2.0, -3.0]]).double()
    reference[0, :2] = own[0, :2] + torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert sequence_kl(own, reference, mask).tolist() == [pytest.approx(0.5, abs=1e-12), 0.0]


def test_it_has_no_graph_and_is_never_negative() -> None:
    own = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = sequence_kl(own, own.detach().flip(0), torch.ones(8, 5, dtype=torch.bool))
    assert not found.requires_grad and bool((found > 0).all())


def test_its_mean_over_samples_is_the_divergence() -> None:
    """Two-sided coins with 1/4 and 1/2: KL = 1/4 ln(1/2) + 3/4 ln(3/2), the exact mean over both sides."""
    own, reference = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.5, 0.5]).double()
    each = sequence_kl(own.log().unsqueeze(1), reference.log().unsqueeze(1), torch.ones(2, 1, dtype=torch.bool))
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert (own * each).sum().item() == pytest.approx(expected, abs=1e-12)
