"""Log-probabilities of the chosen tokens, without a log-softmax over the vocabulary of a whole batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Elements of the fp32 working copy (16 MiB): small beside a batch of logits, large enough to hide the loop.
_CHUNK_ELEMENTS = 1 << 22


def chosen_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)` at the chosen tokens.

    Computed in fp32 whatever the dtype of the logits (fp64 stays fp64). Forward and backward walk over the
    rows in chunks, so that the only tensors of the size of the logits are the logits themselves and their
    gradient.

    Args:
        logits: scores before the softmax, `[B, C, V]`, in any floating dtype.
        token_ids: the chosen tokens, Long `[B, C]`; `logits[b, c]` predicts `token_ids[b, c]`.
        temperature: what the sampler divided the logits by, above 0.

    Returns:
        `[B, C]`, fp32 (or fp64), each at most 0.

    Raises:
        ValueError: the temperature is not above 0, or the shapes do not belong together.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit token_ids {tuple(token_ids.shape)}")
    apply: Callable[..., Tensor] = _ChosenLogprobs.apply
    flat = apply(logits.reshape(-1, logits.shape[-1]), token_ids.reshape(-1), temperature)
    return flat.view(token_ids.shape)


def sequence_logprobs(token_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`log pi(a | h)`: the sum over every completion token, the last one (and its EOS) included.

    Args:
        token_logprobs: `[B, C]`; values outside the mask may be anything.
        mask: True means the token belongs to the completion, Bool `[B, C]`.

    Returns:
        `[B]`; 0 for an empty completion.
    """
    return token_logprobs.masked_fill(~mask, 0.0).sum(dim=1)


def mean_logprobs(token_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per-token mean of the log-probabilities of a completion; 0, not 0/0, where the completion is empty.

    Args:
        token_logprobs: `[B, C]`.
        mask: True means the token belongs to the completion, Bool `[B, C]`.

    Returns:
        `[B]`.
    """
    return sequence_logprobs(token_logprobs, mask) / mask.sum(dim=1).clamp(min=1)


class _ChosenLogprobs(torch.autograd.Function):
    """`log softmax(logits / T)` at one token per row of `[R, V]`, a chunk of rows at a time.

    Written by hand because autograd would keep a log-softmax of the size of the logits for its backward, next
    to the gradient; here the softmax of a chunk is computed again from the logits, which are there anyway.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        chosen = logits.new_empty(len(logits), dtype=dtype)
        for rows in _row_chunks(logits):
            logprobs = functional.log_softmax(_scaled(logits[rows], dtype, temperature), dim=-1)
            chosen[rows] = logprobs.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        return chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor) -> tuple[Tensor, None, None]:
        """d chosen / d logits = (onehot(token) - softmax(logits / T)) / T."""
        logits, token_ids = ctx.saved_tensors
        scale = (grad_chosen / ctx.temperature).unsqueeze(-1)
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            part = functional.softmax(_scaled(logits[rows], scale.dtype, ctx.temperature), dim=-1)
            part.mul_(-scale[rows])
            grad[rows] = part.scatter_add_(-1, token_ids[rows].unsqueeze(-1), scale[rows])
        return grad, None, None


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    logits = logits.to(dtype)
    return logits if temperature == 1 else logits / temperature


def _row_chunks(logits: Tensor) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
