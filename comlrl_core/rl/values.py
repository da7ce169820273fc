"""Values of histories: what a critic learns from, and what an actor learns from a critic.

Multi-agent actor-critic for language models (arXiv 2601.21972); one step is one turn.
"""

import torch
from torch import Tensor


def td_targets(rewards: Tensor, next_values: Tensor, goes_on: Tensor, discount: float) -> Tensor:
    """One-step targets `r_t + discount * V(h_{t+1})`, without the second term where nothing follows.

    Args:
        rewards: `r_t`, `[n]`.
        next_values: the value after the turn, `[n]`; anything where nothing follows.
        goes_on: True means another turn follows (neither the last one nor stopped early), Bool `[n]`.
        discount: weight of what follows.

    Returns:
        `[n]`, detached.
    """
    return (rewards + discount * next_values.masked_fill(~goes_on, 0.0)).detach()


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Squared error `(V - target)^2`, `[n]`; no gradient flows into the targets."""
    return (values - targets.detach()).square()


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip_range: float) -> Tensor:
    """The larger of the squared errors of a value and of the value moved at most `clip_range` from its old one.

    As in the reference implementation of PPO (arXiv 2005.12729, section 2).

    Args:
        values, old_values, targets: `[n]`; gradients flow into `values` alone.
        clip_range: above 0.

    Returns:
        `[n]`.

    Raises:
        ValueError: `clip_range` is not above 0.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range is {clip_range}; allowed is a number above 0")
    old = old_values.detach()
    clipped = old + (values - old).clamp(-clip_range, clip_range)
    return torch.maximum(value_loss(values, targets), value_loss(clipped, targets))


def mean_of_others(values: Tensor, valid: Tensor) -> Tensor:
    """For each entry the mean of the other valid ones of its row: a baseline that does not see the entry itself.

    Args:
        values: `[n, K]`.
        valid: True means the entry counts, Bool `[n, K]`.

    Returns:
        `[n, K]`; 0 where no other entry counts.
    """
    kept = values.masked_fill(~valid, 0.0)
    others = valid.sum(dim=1, keepdim=True) - valid.long()
    return (kept.sum(dim=1, keepdim=True) - kept) / others.clamp(min=1) * (others > 0)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """`1 - Var(target - V) / Var(target)`: 1 for a perfect critic, 0 for a constant one, below 0 for a worse one.

    Args:
        values, targets: `[n]`.

    Returns:
        a number, NaN where the targets do not vary.
    """
    variance = targets.var(correction=0)
    if not len(targets) or variance == 0:
        return float("nan")
    return 1.0 - ((targets - values).var(correction=0) / variance).item()
