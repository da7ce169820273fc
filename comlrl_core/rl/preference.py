"""Losses of pairwise preferences, as functions of the (joint) margin."""

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

LossType = Literal["sigmoid", "ipo", "hinge"]


def preference_loss(
    margin: Tensor, beta: float, loss_type: LossType = "sigmoid", label_smoothing: float = 0.0
) -> Tensor:
    """Loss of each pair, given how much more the policies favour its winner.

    `sigmoid`: `-log sigmoid(beta * margin)` (DPO, arXiv 2305.18290). `hinge`: `max(0, 1 - beta * margin)`
    (SLiC, arXiv 2305.10425). `ipo`: `(margin - 1 / (2 beta))^2` (arXiv 2310.12036); its margin is made of
    per-token means.

    `label_smoothing` is the share `e` of labels that are taken to be the wrong way round:
    `(1 - e) * loss(margin) + e * loss(-margin)` (conservative DPO), for every loss type.

    Args:
        margin: winner minus loser, summed over the agents, a reference's margin subtracted if there is one,
        `[B]`. beta: inverse temperature of the preference, above 0.
        loss_type: one of `sigmoid`, `ipo`, `hinge`.
        label_smoothing: in `[0, 0.5)`.

    Returns:
        `[B]`, never negative.

    Raises:
        ValueError: a setting outside of the above.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    loss = _pair_loss(margin, beta, loss_type)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * _pair_loss(-margin, beta, loss_type)
    return loss


def preference_accuracy(margin: Tensor) -> Tensor:
    """1 where the policies favour the winner (a margin above 0), else 0, in the dtype of `margin`, `[B]`."""
    return (margin > 0).to(margin.dtype)


def _pair_loss(margin: Tensor, beta: float, loss_type: LossType) -> Tensor:
    if loss_type == "sigmoid":
        return -functional.logsigmoid(beta * margin)
    if loss_type == "hinge":
        return functional.relu(1 - beta * margin)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    raise ValueError(f"loss_type is {loss_type!r}; allowed are {', '.join(get_args(LossType))}")
