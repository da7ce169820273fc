"""Texts as token ids, for models that read several of them in one sequence."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> dict[str, Ids]:
    """The ids of each distinct text, without special tokens, from one call of the tokenizer."""
    distinct = list(dict.fromkeys(texts))
    encoded = tokenizer(distinct, add_special_tokens=False, verbose=False)["input_ids"] if distinct else []
    return dict(zip(distinct, map(tuple, encoded), strict=True))


def cut_left(prompts: Sequence[Ids], room: int) -> list[Ids]:
    """The prompts with at most `room` tokens together: the longest lose their oldest tokens until they are level."""
    kept = [0] * len(prompts)
    shortest_first = sorted(range(len(prompts)), key=lambda agent: len(prompts[agent]))
    for position, agent in enumerate(shortest_first):
        kept[agent] = min(len(prompts[agent]), room // (len(prompts) - position))
        room -= kept[agent]
    return [prompt[len(prompt) - keep :] for prompt, keep in zip(prompts, kept, strict=True)]
