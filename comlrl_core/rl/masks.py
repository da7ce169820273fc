"""Which tokens count. Masks come from lengths, never from comparing token ids with the pad id."""

from collections.abc import Sequence

import torch
from torch import Tensor


def completion_lengths(token_ids: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Tokens of each completion up to and including its first end-of-sequence id.

    Args:
        token_ids: completions without their prompt, right-padded with anything, Long `[B, L]`.
        eos_ids: every id that ends a sequence (a model may declare several; none is allowed too).

    Returns:
        Long `[B]`, each in `[0, L]`; `L` where no id of `eos_ids` occurs.
    """
    size = token_ids.shape[1]
    ends = torch.zeros_like(token_ids, dtype=torch.bool)
    for eos_id in eos_ids:
        ends |= token_ids == eos_id
    positions = torch.arange(1, size + 1, device=token_ids.device).expand_as(token_ids)
    lengths = positions.masked_fill(~ends, size)
    return lengths.amin(dim=1) if size else lengths.new_zeros(len(token_ids))


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """True means a real token: the first `lengths[b]` of `size` positions.

    Args:
        lengths: number of real tokens per row, Long `[B]`.
        size: width of the mask.

    Returns:
        Bool `[B, size]`.
    """
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """The place of every token in its own sequence, whatever padding surrounds it.

    The first real token has position 0. Pads on the left get 0 and pads on the right repeat the last
    position: both stay inside a table of absolute positions, and neither is ever attended to.

    Args:
        attention_mask: True (or 1) means a real token, `[B, L]`.

    Returns:
        Long `[B, L]`.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
