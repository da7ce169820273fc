"""How a joint response is written for the reward model: one sequence of token ids, every agent in turn.

    [BOS] prompt_1 response_1 <end> prompt_2 response_2 <end> ...

The end mark is the tokenizer's end-of-sequence token; the score is read at the last one. What is too long loses tokens
from the left of its prompts, the longest prompt first, and never one of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from comlrl_core.errors import DataError
from comlrl_core.preference.records import PairRecord
from comlrl_core.team.encoding import Ids, cut_left, encode_texts


class JointText(NamedTuple):
    """One joint response with its prompts; one text per agent each, in agent order."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class EncodedPair:
    """A winner and a loser as the reward model reads them; `task` groups the pairs of one task."""

    task: str
    winner: Ids
    loser: Ids

    @property
    def longest(self) -> int:
        """Tokens of the longer side."""
        return max(len(self.winner), len(self.loser))


@dataclass
class EncodedPairs:
    """Pairs that can be learned from, and how many others were dropped: `too_long`, `equal_sides`."""

    pairs: list[EncodedPair] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=lambda: {"too_long": 0, "equal_sides": 0})


@dataclass(frozen=True)
class JointEncoder:
    """Writes joint texts as ids.

    `prefix_ids` come first (a BOS, or nothing), `end_ids` after every response. `max_length` is the most tokens of a
    sequence, None without a limit.
    """

    tokenizer: PreTrainedTokenizerBase
    num_agents: int
    prefix_ids: Ids
    end_ids: Ids
    max_length: int | None

    def encode(self, texts: Sequence[JointText]) -> list[Ids | None]:
        """One sequence per joint text, or None where the responses alone do not fit.

        Raises `DataError` for a joint text of another number of agents.
        """
        for text in texts:
            if not len(text.prompts) == len(text.responses) == self.num_agents:
                raise DataError(
                    f"a joint text of {len(text.prompts)} prompts and {len(text.responses)} responses; the reward "
                    f"model reads those of {self.num_agents} agents"
                )
        # All at once, each distinct text once: a task's prompts come with every one of its candidates.
        ids = encode_texts(self.tokenizer, (part for text in texts for part in (*text.prompts, *text.responses)))
        return [self._joined([ids[p] for p in t.prompts], [ids[r] for r in t.responses]) for t in texts]

    def encode_pairs(self, records: Sequence[PairRecord]) -> EncodedPairs:
        """Both sides of every record; without those that do not fit and those whose two sides come out equal."""
        result = EncodedPairs()
        winners = self.encode([JointText(record.prompts, record.winner_completions) for record in records])
        losers = self.encode([JointText(record.prompts, record.loser_completions) for record in records])
        for record, winner, loser in zip(records, winners, losers, strict=True):
            if winner is None or loser is None:
                result.dropped["too_long"] += 1
            elif winner == loser:
                result.dropped["equal_sides"] += 1
            else:
                result.pairs.append(EncodedPair(task_of(record), winner, loser))
        return result

    def _joined(self, prompts: list[Ids], responses: list[Ids]) -> Ids | None:
        if self.prefix_ids and prompts[0][: len(self.prefix_ids)] == self.prefix_ids:
            prompts = [prompts[0][len(self.prefix_ids) :], *prompts[1:]]  # a chat template wrote the BOS already
        if self.max_length is not None:
            fixed = len(self.prefix_ids) + sum(map(len, responses)) + len(self.end_ids) * len(responses)
            if fixed > self.max_length:
                return None
            prompts = cut_left(prompts, self.max_length - fixed)
        parts = [prompt + response + self.end_ids for prompt, response in zip(prompts, responses, strict=True)]
        return self.prefix_ids + tuple(token for part in parts for token in part)


def task_of(record: PairRecord) -> str:
    """What groups the pairs of one task: its id, or (a file of the published format) its prompts."""
    return record.task_id if record.task_id is not None else "\0".join(record.prompts)
