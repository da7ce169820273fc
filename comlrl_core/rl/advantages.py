"""Advantages of a group of returns: a baseline, and optionally a scale, from the group alone."""

from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageMode = Literal["mean", "max", "rloo", "raw"]

STD_FLOOR = 1e-6  # of the normalisation; a group's returns that differ by less are told apart by their difference


def group_advantages(returns: Tensor, valid: Tensor, mode: AdvantageMode, normalize: bool = False) -> Tensor:
    """How much better each return is than its group.

    `mean`: `R_k - mean_l R_l` (GRPO, arXiv 2402.03300, without its scale). `rloo`: `R_k - mean_{l != k} R_l`
    (arXiv 2402.14740), which is K/(K-1) times the former. `max`: `R_k - max_l R_l` (ReMax, arXiv 2310.10505, with the
    group's best in the place of the greedy answer). `raw`: `R_k` (REINFORCE).

    Entries that are not valid take no part in any baseline or scale. A group whose valid returns are all equal gives
    exactly 0 (but for `raw`).

    Args:
        returns: one group per row, `[G, K]`, floating; values outside of `valid` may be anything.
        valid: True means the return counts, Bool `[G, K]`.
        mode: one of `mean`, `max`, `rloo`, `raw`.
        normalize: centre the advantages and divide them by the population standard deviation of the group's returns
            (at least 1e-6). All four modes are then the same, and a group of equal returns gives 0 under each.

    Returns:
        `[G, K]`, 0 outside of `valid`.

    Raises:
        ValueError: an unknown mode, or shapes that do not belong together.
    """
    if mode not in get_args(AdvantageMode):
        raise ValueError(f"mode is {mode!r}; allowed are {', '.join(get_args(AdvantageMode))}")
    _check(returns, valid)
    returns = returns.masked_fill(~valid, 0.0)
    count = valid.sum(dim=1, keepdim=True)
    mean = returns.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = returns - mean
    if normalize:
        variance = centred.masked_fill(~valid, 0.0).square().sum(dim=1, keepdim=True) / count.clamp(min=1)
        advantages = centred / variance.sqrt().clamp(min=STD_FLOOR)
    elif mode == "mean":
        advantages = centred
    elif mode == "rloo":
        others = (returns.sum(dim=1, keepdim=True) - returns) / (count - 1).clamp(min=1)
        advantages = returns - others
    elif mode == "max":
        advantages = returns - returns.masked_fill(~valid, -torch.inf).amax(dim=1, keepdim=True)
    else:
        advantages = returns
    nothing = ~valid
    if normalize or mode != "raw":  # exactly 0, where rounding of the mean would leave 1e-17
        nothing = nothing | zero_variance(returns, valid).unsqueeze(1)
    return advantages.masked_fill(nothing, 0.0)


def zero_variance(returns: Tensor, valid: Tensor) -> Tensor:
    """True means that the valid returns of a group are all equal (one, or none, included): nothing to tell apart.

    Args:
        returns: `[G, K]`.
        valid: Bool `[G, K]`.

    Returns:
        Bool `[G]`.
    """
    _check(returns, valid)
    highest = returns.masked_fill(~valid, -torch.inf).amax(dim=1)
    lowest = returns.masked_fill(~valid, torch.inf).amin(dim=1)
    return highest <= lowest


def _check(returns: Tensor, valid: Tensor) -> None:
    if returns.dim() != 2 or returns.shape != valid.shape:
        raise ValueError(f"returns {tuple(returns.shape)} and valid {tuple(valid.shape)} must both be [G, K]")
