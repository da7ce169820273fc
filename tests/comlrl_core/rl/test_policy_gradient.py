"""The policy gradient, by hand."""

import pytest
import torch

from comlrl_core.rl.policy_gradient import reinforce_loss


def test_by_hand() -> None:
    """-A log pi: -(2)(-3) = 6 and -(-1)(-4) = -4; the slope is -A."""
    logprobs = torch.tensor([-3.0, -4.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -1.0], requires_grad=True)
    loss = reinforce_loss(logprobs, advantages)
    loss.sum().backward()
    assert loss.tolist() == [6.0, -4.0] and loss.dtype == torch.float64
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2.0, 1.0]
    assert advantages.grad is None


def test_its_gradient_is_that_of_the_expected_return() -> None:
    """A choice of two with logits z: grad E[R] over both samples, weighted by their probabilities, is exact.

    pi = (1/2, 1/2), R = (1, 0): d E[R] / d z = pi_k (R_k - E[R]) = (1/4, -1/4); the loss's gradient is its negative.
    """
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=0)
    (reinforce_loss(logprobs, torch.tensor([1.0, 0.0])) * logprobs.detach().exp()).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-0.25, 0.25], abs=1e-12)
