"""How histories are written for a critic with a model of its own: one sequence of token ids, agent after agent.

    [BOS] prompt response <end> prompt <end> ...        an agent's history in the order of its turns

The end mark is the tokenizer's end-of-sequence token; the value is read at the last one. What is too long loses tokens
from the left of its prompts, the longest prompt first; if its responses alone do not fit, the oldest tokens go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from comlrl_core.team.encoding import Ids, cut_left, encode_texts


class History(NamedTuple):
    """What one agent has seen and said: a response to every prompt, or to all but the last one."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class HistoryEncoder:
    """Writes histories as ids; fields as for `preference.reward_model.encoding.JointEncoder`."""

    tokenizer: PreTrainedTokenizerBase
    prefix_ids: Ids
    end_ids: Ids
    max_length: int | None

    def encode(self, histories: Sequence[Sequence[History]]) -> list[Ids]:
        """One sequence per entry; an entry holds the histories of one agent or of several, in agent order."""
        ids = encode_texts(self.tokenizer, (text for entry in histories for one in entry for text in _texts(one)))
        return [self._joined([self._pieces(one, ids) for one in entry]) for entry in histories]

    def _pieces(self, history: History, ids: dict[str, Ids]) -> list[tuple[bool, Ids]]:
        """(is a prompt, ids) of an agent's texts, in order."""
        pieces: list[tuple[bool, Ids]] = []
        for prompt, response in zip_longest(history.prompts, history.responses):
            pieces.append((True, ids[prompt]))
            pieces.append((False, (ids[response] if response is not None else ()) + self.end_ids))
        return pieces

    def _joined(self, agents: Sequence[Sequence[tuple[bool, Ids]]]) -> Ids:
        pieces = [piece for agent in agents for piece in agent]
        if self.prefix_ids and pieces[0][1][: len(self.prefix_ids)] == self.prefix_ids:
            pieces[0] = (True, pieces[0][1][len(self.prefix_ids) :])  # a chat template wrote the BOS already
        if self.max_length is not None:
            fixed = len(self.prefix_ids) + sum(len(ids) for is_prompt, ids in pieces if not is_prompt)
            prompts = iter(cut_left([ids for is_prompt, ids in pieces if is_prompt], max(0, self.max_length - fixed)))
            pieces = [(is_prompt, next(prompts) if is_prompt else ids) for is_prompt, ids in pieces]
        whole = self.prefix_ids + tuple(token for _, ids in pieces for token in ids)
        return whole if self.max_length is None else whole[-self.max_length :]


def _texts(history: History) -> tuple[str, ...]:
    return (*history.prompts, *history.responses)
