"""Log-probabilities of given completions under a causal language model, however they are batched."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comlrl_core.errors import DataError
from comlrl_core.rl.logprobs import chosen_logprobs
from comlrl_core.rl.masks import length_mask, position_ids


@contextmanager
def scoring_mode(*models: nn.Module) -> Iterator[None]:
    """Dropout off while scoring or training; gradients still flow. Every module is put back afterwards."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def score_completions(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    temperature: float = 1.0,
    padding_side: Literal["right", "left"] = "right",
) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token, from one forward pass.

    Prompt and completion are told apart by their lengths, so either may contain the pad or an end-of-sequence
    id. Positions are counted from each sequence's own first token and given to the model, and pads are
    masked: a sequence scores the same alone and in a batch. The language-model head runs only over the
    columns that predict some completion token.

    Dropout is the caller's affair: wrap the call in `scoring_mode(model)`.

    Args:
        model: a causal language model of Transformers, or a wrapper of one (PEFT, DDP, DeepSpeed).
        prompt_ids: `B` prompts of at least one token.
        completion_ids: `B` completions; the end-of-sequence id included where the completion has ended. May
        be empty. pad_id: fills the batch up to a rectangle; any valid id.
        temperature: what the sampler divided the logits by; preference margins use 1.
        padding_side: where whole sequences are padded. The result does not depend on it.

    Returns:
        `token_logprobs`, fp32 (or fp64) `[B, C]` with `C = max(1, longest completion)`, 0 outside the mask,
        and `mask`, Bool `[B, C]`, True means a completion token. Both on the model's device.

    Raises:
        DataError: a prompt is empty (nothing would predict the first token) or the counts differ.
    """
    if len(prompt_ids) != len(completion_ids) or not prompt_ids:
        counts = f"{len(prompt_ids)} prompts for {len(completion_ids)} completions"
        raise DataError(f"{counts}; equal counts above 0 are needed")
    if empty := [row for row, prompt in enumerate(prompt_ids) if not len(prompt)]:
        raise DataError(f"prompt {empty[0]} of the batch is empty; a token (such as BOS) has to come first")

    device = next(model.parameters()).device
    input_ids, attention_mask, first = _pad(prompt_ids, completion_ids, pad_id, padding_side)
    start = int(first.min()) - 1  # column whose logits predict the leftmost completion token of the batch
    columns = torch.arange(start, input_ids.shape[1] - 1)
    input_ids, attention_mask, first, columns = (t.to(device) for t in (input_ids, attention_mask, first, columns))

    logits = _logits(model, input_ids, attention_mask, columns)
    by_column = chosen_logprobs(logits, input_ids[:, start + 1 :], temperature)

    lengths = torch.tensor([len(completion) for completion in completion_ids], device=device)
    mask = length_mask(lengths, max(1, *map(len, completion_ids)))
    index = (first - 1 - start).unsqueeze(1) + torch.arange(mask.shape[1], device=device)
    token_logprobs = by_column.gather(1, index.clamp(max=len(columns) - 1))
    return token_logprobs.masked_fill(~mask, 0.0), mask


def _pad(
    prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], pad_id: int, side: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`input_ids` and Bool `attention_mask` `[B, L]`, and the column of each first completion token `[B]`."""
    if side not in ("right", "left"):
        raise ValueError(f"padding_side is {side!r}; allowed are right, left")
    rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    width = max(map(len, rows))
    if not any(map(len, completion_ids)):
        width += 1  # a column to score although nothing counts, so that the (zero) result still has a graph
    pads = [[pad_id] * (width - len(row)) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    if side == "right":
        input_ids = torch.tensor([row + pad for row, pad in zip(rows, pads, strict=True)])
        attention_mask = length_mask(lengths, width)
        first = torch.tensor([len(prompt) for prompt in prompt_ids])
    else:
        input_ids = torch.tensor([pad + row for row, pad in zip(rows, pads, strict=True)])
        attention_mask = length_mask(lengths, width).flip(1)
        first = torch.tensor([width - len(completion) for completion in completion_ids])
    # An empty completion has no first token of its own; any column inside the batch will do.
    return input_ids, attention_mask, first.clamp(max=width - 1)


def _logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, columns: Tensor) -> Tensor:
    """Logits `[B, len(columns), V]` of the given, contiguous columns."""
    accepted = inspect.signature(unwrapped(model).forward).parameters
    kwargs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    if "position_ids" in accepted:
        kwargs["position_ids"] = position_ids(attention_mask)
    if "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = columns
    logits: Tensor = model(**kwargs).logits
    if "logits_to_keep" not in accepted:
        logits = logits[:, -len(columns) - 1 : -1]
    return logits


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose forward names its arguments; wrappers (DDP, DeepSpeed, PEFT) take `**kwargs`."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model
