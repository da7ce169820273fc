"""The Bradley-Terry model of preferences (Biometrika 39, 1952): P(a beats b) = sigmoid(score(a) - score(b))."""

import torch
from torch import Tensor
from torch.nn import functional


def bradley_terry_loss(winner_scores: Tensor, loser_scores: Tensor, center_rewards_coef: float = 0.0) -> Tensor:
    """`-log sigmoid(r(winner) - r(loser)) + center_rewards_coef * (r(winner) + r(loser))^2`, in fp32 (fp64 stays).

    The model knows scores up to a constant alone; the second term (arXiv 2312.09244) pulls them towards a mean of 0.

    Args:
        winner_scores, loser_scores: `[B]`, any floating dtype.
        center_rewards_coef: 0 or more.

    Returns:
        `[B]`, never negative.
    """
    if not center_rewards_coef >= 0:
        raise ValueError(f"center_rewards_coef is {center_rewards_coef}; it must be 0 or more")
    winners, losers = _wide(winner_scores), _wide(loser_scores)
    loss = -functional.logsigmoid(winners - losers)
    if center_rewards_coef:
        loss = loss + center_rewards_coef * (winners + losers) ** 2
    return loss


def bradley_terry_accuracy(winner_scores: Tensor, loser_scores: Tensor) -> Tensor:
    """1 where the winner scores higher, 1/2 where both score the same, else 0, fp32 (or fp64), `[B]`."""
    margin = _wide(winner_scores) - _wide(loser_scores)
    return (margin.sign() + 1) / 2


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
