"""A language model that answers with one number: a backbone without its language-model head, and a scalar head."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.rl.masks import length_mask, position_ids
from comlrl_core.team.agent import eos_ids
from comlrl_core.team.encoding import Ids
from comlrl_core.team.generation import DEFAULT_TOKENS_PER_BATCH
from comlrl_core.team.scoring import scoring_mode, unwrapped

HEAD_STD = 0.02  # where a configuration names no `initializer_range`


class ScalarHead(nn.Module):
    """From the last hidden state to one number, in fp32: linear, or with one hidden layer of `hidden_dim`.

    The last layer starts with the backbone's initial spread and a bias of 0, so that first answers are near 0.
    """

    def __init__(self, backbone: PreTrainedModel, hidden_dim: int | None, seed: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        size, std = hidden_size(backbone), initial_std(backbone)
        generator = torch.Generator().manual_seed(seed % 2**63)
        widths = [size, 1] if hidden_dim is None else [size, hidden_dim, 1]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        with torch.no_grad():
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                last = layer.out_features == 1
                layer.weight.normal_(0.0, std if last else layer.in_features**-0.5, generator=generator)
                layer.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, H]`, in the dtype of the head, to `[B, 1]`."""
        for layer in self.layers[:-1]:
            hidden = torch.tanh(layer(hidden))
        result: Tensor = self.layers[-1](hidden)
        return result


class ScalarModel(nn.Module):
    """A causal language model without its head, its tokenizer and a head in fp32 on the last hidden state.

    Args:
        backbone: the model without its language-model head (`model.base_model` of a causal one).
        tokenizer: the backbone's; it need not be the agents'.
        head: `[B, H]` to `[B, 1]`.
        source: what the backbone was loaded from, for records.
    """

    def __init__(
        self, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: nn.Module, source: str
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.source = source
        self._tokenizer = tokenizer
        self.head = head.to(next(backbone.parameters()).device)
        self.end_ids = end_of_text(backbone, tokenizer)
        self.eval()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def pad_id(self) -> int:
        """Fills a batch; masks come from lengths, so it may be any valid id."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else next(iter(self.end_ids), 0)

    @property
    def device(self) -> torch.device:
        return next(self.head.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One number per row of a padded batch.

        Args:
            input_ids: Long `[B, L]`.
            attention_mask: True means a real token, Bool `[B, L]`; pads on either side.

        Returns:
            `[B]`, fp32 (or fp64).
        """
        hidden = last_hidden(self.backbone, input_ids, attention_mask)
        result: Tensor = self.head(hidden.to(next(self.head.parameters()).dtype))
        return (result if result.dtype == torch.float64 else result.float()).squeeze(-1)

    def batch(self, sequences: Sequence[Ids], padding_side: str = "right") -> tuple[Tensor, Tensor]:
        """`input_ids` and `attention_mask` `[B, L]` of some sequences, on the model's device."""
        return padded(sequences, self.pad_id, self.device, padding_side)

    @torch.no_grad()
    def score_ids(self, sequences: Sequence[Ids], tokens_per_batch: int | None = None) -> list[float]:
        """A number per sequence; neighbours in length share a batch of at most `tokens_per_batch` tokens."""
        scores = [0.0] * len(sequences)
        with gathered(self), scoring_mode(self):
            for rows in by_length(sequences, tokens_per_batch or DEFAULT_TOKENS_PER_BATCH):
                found = self(*self.batch([sequences[row] for row in rows])).tolist()
                for row, score in zip(rows, found, strict=True):
                    scores[row] = float(score)
        return scores


def last_hidden(backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The last hidden state at the last real token of each row, `[B, H]`; no language-model head is computed."""
    hidden: Tensor = backbone(**_inputs(backbone, input_ids, attention_mask)).last_hidden_state
    return _at_last(hidden, attention_mask)


def last_hidden_inside(model: nn.Module, backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """As `last_hidden`, by a call of what `backbone` is wrapped in: an engine's wrapper, a model with adapters.

    Their language-model head is computed for one column, and not used.
    """
    kept: list[Tensor] = []
    handle = backbone.register_forward_hook(lambda _module, _inputs, output: kept.append(output.last_hidden_state))
    inputs = _inputs(backbone, input_ids, attention_mask)
    if "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters:
        inputs["logits_to_keep"] = 1
    try:
        model(**inputs)
    finally:
        handle.remove()
    return _at_last(kept[0], attention_mask)


def _inputs(backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    accepted = inspect.signature(backbone.forward).parameters
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if "position_ids" in accepted:
        inputs["position_ids"] = position_ids(attention_mask)
    return inputs


def _at_last(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    places = torch.arange(attention_mask.shape[1], device=hidden.device)
    last = (attention_mask.long() * places).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def padded(
    sequences: Sequence[Ids], pad_id: int, device: torch.device, padding_side: str = "right"
) -> tuple[Tensor, Tensor]:
    """`input_ids` and Bool `attention_mask` `[B, L]` of some sequences."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    width = int(lengths.max())
    mask = length_mask(lengths, width)
    rows = [[pad_id] * (width - len(ids)) for ids in sequences]
    if padding_side == "left":
        mask = mask.flip(1)
        input_ids = torch.tensor([pad + list(ids) for ids, pad in zip(sequences, rows, strict=True)])
    else:
        input_ids = torch.tensor([list(ids) + pad for ids, pad in zip(sequences, rows, strict=True)])
    return input_ids.to(device), mask.to(device)


def by_length(sequences: Sequence[Ids], tokens_per_batch: int) -> list[list[int]]:
    """Indices in batches of at most `tokens_per_batch` padded tokens, the longest sequences first."""
    batches: list[list[int]] = []
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        # The first of a batch is its longest, and sets its width.
        if not batches or (len(batches[-1]) + 1) * len(sequences[batches[-1][0]]) > tokens_per_batch:
            batches.append([])
        batches[-1].append(row)
    return batches


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """A causal language model without its head. Raises `ConfigError` where it has none."""
    whole = cast(PreTrainedModel, unwrapped(model))
    backbone = cast(PreTrainedModel, whole.base_model)
    if backbone is whole:
        raise ConfigError(f"{type(whole).__name__} has no backbone beside its language-model head")
    return backbone


def hidden_size(backbone: PreTrainedModel) -> int:
    """Width of the last hidden state."""
    return int(backbone.config.get_text_config().hidden_size)


def initial_std(backbone: PreTrainedModel) -> float:
    """Spread of a new head's weights."""
    return float(getattr(backbone.config.get_text_config(), "initializer_range", None) or HEAD_STD)


def end_of_text(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """One end-of-sequence token, or a line break where the tokenizer has none."""
    declared = eos_ids(backbone, tokenizer)
    if declared:
        return declared[:1]
    return tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
