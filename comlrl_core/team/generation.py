"""Batched sampling whose result does not depend on the batch.

Each sample owns a stream of uniform numbers, one per step, and picks its tokens by inverting the cumulative
distribution: alone, in a batch of any size, or after its neighbours have left, it draws the same tokens.
Prompts are padded on the left with explicit positions, read once each, and their key/value cache is then
shared out to their samples.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.randomness import uniforms

# Cache entries (samples x longest length) held at once unless the caller says otherwise: 3 GB for a model of
# 24 layers with 1,024 key/value features each in bf16.
DEFAULT_TOKENS_PER_BATCH = 32_768
# Copying the cache costs about as much as one step, so finished rows leave in groups of at least this share.
COMPACT_SHARE = 0.25
# Logits turned into cumulative probabilities at once. On a CPU 4 MB of float64 stay in the cache and are not
# fetched anew from the system at each step (32 x 49,152 logits: 3 ms in parts, 9 to 15 ms at once); on a GPU
# this bounds the memory.
CPU_ELEMENTS, GPU_ELEMENTS = 2**19, 2**26


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 takes the most likely token; `top_p` 1 and `top_k` None switch
    truncation off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, or null for no limit, not {self.top_k}")


@dataclass(frozen=True)
class Generation:
    """One sampled completion: its ids up to and including the first EOS; `finished` False means it was cut
    off."""

    token_ids: tuple[int, ...]
    finished: bool


def generate(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    *,
    num_samples: int,
    sampling: Sampling,
    keys: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
    pad_id: int,
    tokens_per_batch: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> list[list[Generation]]:
    """`num_samples` completions of each of `P` prompts: a list `[P][num_samples]`.

    `keys[p][k]` names the stream of sample `k` of prompt `p` (`randomness.stream_key`). At most
    `tokens_per_batch` cache entries (samples x longest prompt plus `max_new_tokens`) are held at once, but
    always at least one sample's. `on_progress(n)` is told of every `n` samples that are done. Dropout is off
    and no graph is kept, whatever the mode the model is in, which is left as it was. Greedy choice needs no
    randomness, so all samples of a prompt are then equal.
    """
    if num_samples < 1:
        raise ConfigError(f"the number of samples must be at least 1, not {num_samples}")
    if len(keys) != len(prompt_ids) or any(len(row) != num_samples for row in keys):
        raise ValueError(f"keys must be {len(prompt_ids)} rows of {num_samples}, one per prompt and sample")
    for index, ids in enumerate(prompt_ids):
        if not ids:
            raise DataError(f"prompt {index} has no tokens: a model needs at least one to continue from")
    results: list[list[Generation]] = [[] for _ in prompt_ids]
    with _sampling_mode(model):
        for samples in _batches(prompt_ids, num_samples, sampling.max_new_tokens, tokens_per_batch):
            streams = uniforms([keys[p][k] for p, k in samples], sampling.max_new_tokens)
            prompts = list(dict.fromkeys(p for p, _ in samples))
            row_of = {p: row for row, p in enumerate(prompts)}
            drawn = _run(
                model,
                [prompt_ids[p] for p in prompts],
                [row_of[p] for p, _ in samples],
                torch.from_numpy(streams),
                sampling,
                eos_ids,
                pad_id,
                on_progress,
            )
            for (p, _), one in zip(samples, drawn, strict=True):  # samples of a prompt come in order
                results[p].append(one)
    return results


def choose_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """The token of each row: `logits [B, V]`, `uniform [B]` float64 in [0, 1) -> Long `[B]`.

    A row picks the first token at which the cumulative probability exceeds its number. The sum runs in
    float64: in float32 the tail of a large vocabulary would be lost. Truncation follows temperature, top-k
    first (ties with the k-th stay), then top-p: the smallest set of most likely tokens that reaches `top_p`
    (Holtzman et al., arXiv 1904.09751). Raises `TrainingError` when the logits are not finite.
    """
    at_once = max(1, (CPU_ELEMENTS if logits.device.type == "cpu" else GPU_ELEMENTS) // logits.shape[-1])
    if logits.shape[0] > at_once:
        parts = zip(logits.split(at_once), uniform.split(at_once), strict=True)
        return torch.cat([choose_tokens(*part, sampling) for part in parts])
    logits = logits.float()
    if sampling.temperature == 0.0:
        top, token = logits.max(dim=-1)
        _check_finite(top)
        return token
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        outside = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        probabilities = probabilities.masked_fill(outside, 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    _check_finite(total)
    # Rounding must not lift the target to the total itself, beyond which there is no token.
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _run(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    streams: Tensor,
    sampling: Sampling,
    eos_ids: Sequence[int],
    pad_id: int,
    on_progress: Callable[[int], object] | None,
) -> list[Generation]:
    """One batch: sample `b` continues `prompts[rows[b]]` with the numbers `streams[b]`."""
    device = next(model.parameters()).device
    steps, count = sampling.max_new_tokens, len(rows)
    forward = _Forward(model, prompts, pad_id, steps, device)
    logits = forward.prefill()
    if list(rows) != list(range(len(prompts))):
        select = torch.tensor(rows, device=device)
        forward.select(select)
        logits = logits[select]
    numbers = streams.to(device)
    eos = torch.tensor(list(eos_ids), dtype=torch.long, device=device)
    out = torch.full((count, steps), pad_id, dtype=torch.long, device=device)
    lengths = torch.full((count,), steps, dtype=torch.long, device=device)
    active = torch.arange(count, device=device)  # which sample each row of the batch is
    done = torch.zeros(count, dtype=torch.bool, device=device)
    finished = 0
    for step in range(steps):
        token = choose_tokens(logits, numbers[:, step], sampling)
        out[active, step] = token
        if len(eos):
            ended = torch.isin(token, eos) & ~done
            if bool(ended.any()):
                lengths[active[ended]] = step + 1
                done |= ended
                now = int(done.sum())
                if on_progress is not None:
                    on_progress(now - finished)
                finished = now
                if finished == len(active):
                    break
                if step + 1 < steps and finished >= COMPACT_SHARE * len(active):
                    keep = (~done).nonzero().squeeze(-1)
                    forward.select(keep)
                    active, numbers, token = active[keep], numbers[keep], token[keep]
                    done, finished = done[keep], 0
        if step + 1 < steps:
            logits = forward.step(token)
    if on_progress is not None and finished < len(active):
        on_progress(len(active) - finished)
    ends = set(eos_ids)
    drawn = []
    for ids, length in zip(out.tolist(), lengths.tolist(), strict=True):
        ids = ids[:length]
        drawn.append(Generation(tuple(ids), finished=ids[-1] in ends))
    return drawn


class _Forward:
    """The model's forward with its cache, mask and positions, for prompts padded on the left to one
    length."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        pad_id: int,
        steps: int,
        device: torch.device,
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self.width = max(lengths)
        ids = [[pad_id] * (self.width - len(prompt)) + list(prompt) for prompt in prompts]
        self.model = model
        # Adapters hide the signature of the model inside.
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.takes = _forward_arguments(type(inner).forward)
        self.ids = torch.tensor(ids, dtype=torch.long, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.long, device=device)
        # Room for every step at once; a step then takes a view. None when nothing is padded: attention is
        # quicker without.
        columns = torch.arange(self.width + steps, device=device)
        self.mask: Tensor | None = (columns >= (self.width - self.lengths).unsqueeze(-1)).long()
        if min(lengths) == self.width:
            self.mask = None
        self.cache = DynamicCache(config=model.config)
        self.seen = self.width

    def prefill(self) -> Tensor:
        """Read the prompts: logits `[P, V]` of the first new token."""
        padding = (self.width - self.lengths).unsqueeze(-1)
        positions = (torch.arange(self.width, device=self.ids.device) - padding).clamp(min=0)
        return self._call(self.ids, positions)

    def step(self, token: Tensor) -> Tensor:
        """Read one more token per row `[B]`: logits `[B, V]` of the next."""
        self.seen += 1
        logits = self._call(token.unsqueeze(-1), self.lengths.unsqueeze(-1))
        self.lengths = self.lengths + 1
        return logits

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows of the batch. `reorder_cache` is the one method that every kind of
        layer has."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
        self.lengths = self.lengths[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def _call(self, ids: Tensor, positions: Tensor) -> Tensor:
        arguments: dict[str, object] = {"use_cache": True, self.takes.cache: self.cache}
        if self.mask is not None:
            arguments["attention_mask"] = self.mask[:, : self.seen]
        if self.takes.position_ids:
            arguments["position_ids"] = positions
        if self.takes.logits_to_keep:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self.model(ids, **arguments).logits
        return logits[:, -1]


@dataclass(frozen=True)
class _Arguments:
    cache: str
    position_ids: bool
    logits_to_keep: bool


@lru_cache
def _forward_arguments(forward: Callable[..., object]) -> _Arguments:
    names = inspect.signature(forward).parameters
    return _Arguments(
        cache="cache" if "cache" in names else "past_key_values",  # renamed in Transformers 5.2x
        position_ids="position_ids" in names,
        logits_to_keep="logits_to_keep" in names,
    )


def _batches(
    prompt_ids: Sequence[Sequence[int]], num_samples: int, max_new_tokens: int, tokens_per_batch: int | None
) -> Iterator[list[tuple[int, int]]]:
    """Samples `(prompt, sample)` in batches, prompts of like length together so that little is padded."""
    limit = DEFAULT_TOKENS_PER_BATCH if tokens_per_batch is None else tokens_per_batch
    if limit < 1:
        raise ConfigError(f"tokens_per_batch must be at least 1, not {tokens_per_batch}")
    batch: list[tuple[int, int]] = []
    for p in sorted(range(len(prompt_ids)), key=lambda p: len(prompt_ids[p])):
        for k in range(num_samples):
            if batch and (len(batch) + 1) * (len(prompt_ids[p]) + max_new_tokens) > limit:
                yield batch
                batch = []
            batch.append((p, k))
    if batch:
        yield batch


@contextmanager
def _sampling_mode(model: PreTrainedModel) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def _check_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise TrainingError("the model's logits are not finite (NaN or infinite): its weights have diverged")
