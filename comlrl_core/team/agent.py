"""One agent: a model, its tokenizer and what is true of both.

Token ids are the record: text is turned into ids here and nowhere else, so that there is one BOS at the front
of a prompt and one EOS at the end of a finished completion, whatever the tokenizer would add by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.team.sources import CONTEXT_FIELDS


@dataclass(frozen=True)
class Agent:
    """Agent `index` of a team. `context_length` is in tokens, None when the model names no limit.

    `eos_ids` are all ids that end a sequence; `pad_id` may equal one of them (masks come from lengths).
    `prefix_ids` are the special tokens which the tokenizer puts in front of a text by default (a BOS, or
    nothing).
    """

    index: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    eos_ids: tuple[int, ...]
    pad_id: int
    context_length: int | None
    prefix_ids: tuple[int, ...] = field(default=())

    @property
    def device(self) -> torch.device:
        """Where the model's parameters live."""
        return next(self.model.parameters()).device

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a rendered prompt with exactly one BOS in front where the tokenizer or the text wants one,
        and no EOS.

        A chat template may have written the BOS already; the tokenizer's own one is then not added again.
        """
        ids = _encode(self.tokenizer, text)
        bos = self.tokenizer.bos_token_id
        if self.prefix_ids and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            ids = [*self.prefix_ids, *ids]
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def encode_completion(self, text: str, finished: bool) -> list[int]:
        """Ids of a completion that came as text: one EOS at the end if it is finished, none if it was cut
        off.

        Sampled completions keep the ids that were sampled and never come here. Text after an EOS written in
        the text itself is no part of the completion.
        """
        ids = _encode(self.tokenizer, text)
        for position, token in enumerate(ids):
            if token in self.eos_ids:
                return ids[: position + 1] if finished else ids[:position]
        if finished and self.eos_ids:
            ids.append(self.eos_ids[0])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens and without the EOS at the end."""
        ids = list(ids)
        if (
            ids and ids[-1] in self.eos_ids
        ):  # an EOS that only `generation_config` declares is not "special" to the tokenizer
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def make_agent(index: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> Agent:
    """Read off a model and its tokenizer what an `Agent` needs to know."""
    eos = eos_ids(model, tokenizer)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = eos[0] if eos else 0
    return Agent(
        index=index,
        model=model,
        tokenizer=tokenizer,
        source=source,
        eos_ids=eos,
        pad_id=int(pad),
        context_length=context_length(model),
        prefix_ids=default_prefix(tokenizer),
    )


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a sequence: the tokenizer's (first), then those of `config` and of
    `generation_config`.

    Chat models declare several in `generation_config`; each of them ends a turn. Ids outside the vocabulary,
    which configuration classes of small models inherit as defaults, are left out.
    """
    declared: list[int] = []
    for value in (
        tokenizer.eos_token_id,
        getattr(model.config, "eos_token_id", None),
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
    ):
        if value is not None:
            declared += [int(one) for one in value] if isinstance(value, Iterable) else [int(value)]
    vocab_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    return tuple(dict.fromkeys(token for token in declared if 0 <= token < vocab_size))


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence (prompt + completion, in tokens) that the model's configuration allows, or
    None."""
    config = model.config.get_text_config()
    for name in CONTEXT_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def default_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts in front of a text by default (a BOS, or nothing)."""
    plain = _encode(tokenizer, "a")
    full = [int(token) for token in tokenizer("a", add_special_tokens=True)["input_ids"]]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
