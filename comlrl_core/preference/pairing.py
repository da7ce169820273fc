"""From scored candidates to pairs. Ties train nothing; every candidate and comparison is accounted for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.preference.records import COMPARATOR, CURRENT, PairRecord, TokenIds
from comlrl_core.randomness import generator

OFFLINE_SELECTIONS = ("reward_gap", "all", "random")
ITERATIVE_SELECTIONS = ("comparator_reward", "reward_gap", "all", "random")
COUNTS = (
    "tasks",
    "tasks_without_pairs",
    "candidates",
    "dropped",
    "unmatched",
    "pairs_possible",
    "duplicates",
    "ties",
    "near_ties",
    "not_selected",
    "pairs",
)


@dataclass
class PairingResult:
    """The pairs, task by task, and the counts.

    `candidates` (both sides) of `tasks`, `dropped` for a bad reward, `unmatched` (iterative: an index with a
    usable reward on one side only). `pairs_possible` comparisons = `duplicates` (same joint text) + `ties`
    (same reward) + `near_ties` (gap below the minimum) + `not_selected` (beyond the number per task) +
    `pairs`.
    """

    records: list[PairRecord] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))


class _Comparison(NamedTuple):
    """Two candidates of a task; `first` is the team's (offline: the smaller index), `gap` first minus second.

    Scores and gap are integers in the unit of `_whole_numbers`.
    """

    first: JointResponse
    second: JointResponse
    second_score: int
    gap: int


def make_pairs(
    candidates: Sequence[TaskCandidates],
    *,
    selection: str,
    pairs_per_sample: int | None,
    iterative: bool,
    min_reward_gap: float = 0.0,
    oracle: str | None = None,
    stream: Sequence[int | str] = (),
) -> PairingResult:
    """The pairs of every task, at most `pairs_per_sample` each (None: all).

    Offline (`iterative=False`): each unordered pair of the team's own candidates. Iterative: the team's
    candidate j against the comparator's candidate j, for the indices that both sides have. The higher
    processed reward wins; equal rewards and equal joint texts give no pair, nor does a gap below
    `min_reward_gap`.

    `selection`: `reward_gap` (largest gap first), `comparator_reward` (iterative: highest comparator reward
    first, then gap), `all` (in index order, no limit) or `random` (a draw from the stream named by `stream`
    and the task's id). What is still equal is ordered by index. Rewards are compared as the decimal numbers
    that they are written as, so 0.3 and 0.2 have a gap of exactly 0.1.

    Raises `ConfigError` for settings that do not fit together, `DataError` for a candidate without a reward
    or a task without a comparator side.
    """
    allowed = ITERATIVE_SELECTIONS if iterative else OFFLINE_SELECTIONS
    if selection not in allowed:
        raise ConfigError(f"pair_selection: {selection!r} is not possible here; allowed: {', '.join(allowed)}")
    if pairs_per_sample is not None and (selection == "all" or pairs_per_sample < 1):
        what = "null with pair_selection: all" if selection == "all" else "null or at least 1"
        raise ConfigError(f"preference_pairs_per_sample: must be {what}, got {pairs_per_sample}")
    if not 0 <= min_reward_gap < float("inf"):
        raise ConfigError(f"min_reward_gap: must be 0 or more and finite, got {min_reward_gap}")
    result = PairingResult()
    counts = result.counts
    for task in candidates:
        usable = _usable(task, iterative)
        (minimum, *scores), unit = _whole_numbers([min_reward_gap, *(reward for _, reward in usable)])
        comparisons = _comparisons([response for response, _ in usable], scores, task.comparator)
        counts["tasks"] += 1
        counts["candidates"] += len(task.responses)
        counts["dropped"] += sum(response.dropped for response in task.responses)
        counts["pairs_possible"] += len(comparisons)
        counts["unmatched"] += len(usable) - 2 * len(comparisons) if iterative else 0
        kept = []
        for comparison in comparisons:
            reason = _refusal(comparison, minimum)
            if reason is None:
                kept.append(comparison)
            else:
                counts[reason] += 1
        chosen = _ordered(kept, selection, (*stream, task.task_id))[:pairs_per_sample]
        counts["not_selected"] += len(kept) - len(chosen)
        counts["pairs"] += len(chosen)
        counts["tasks_without_pairs"] += not chosen
        if chosen:
            mean = float(Fraction(sum(scores), unit * len(scores)))
            result.records += [_record(task, comparison, mean, iterative, oracle) for comparison in chosen]
    return result


def _whole_numbers(values: Sequence[float]) -> tuple[list[int], int]:
    """`values` as integers, and how many of them make one: exact, and quick to compare and subtract."""
    # repr is the shortest decimal that reads back as this float: order and equality are the floats' own.
    exact = [Fraction(repr(float(value))) for value in values]
    unit = lcm(*(value.denominator for value in exact))
    return [value.numerator * (unit // value.denominator) for value in exact], unit


def _usable(task: TaskCandidates, iterative: bool) -> list[tuple[JointResponse, float]]:
    """All candidates that have a reward, with it, the team's first."""
    if iterative and task.comparator is None:
        raise DataError(f"task {task.task_id!r}: there are no comparator candidates to compare with")
    if not iterative and task.comparator is not None:
        raise DataError(f"task {task.task_id!r}: comparator candidates are for iterative pairing alone")
    usable = []
    for response in task.responses:
        if response.reward is not None and not response.dropped:
            usable.append((response, response.reward))
        elif not response.dropped:
            raise DataError(f"task {task.task_id!r}: candidate {response.index} ({response.source}) has no reward yet")
    return usable


def _comparisons(
    usable: list[JointResponse], scores: list[int], comparator: list[JointResponse] | None
) -> list[_Comparison]:
    """All that can be compared, in index order: each two of the team, or equal indices of both sides."""
    scored = list(zip(usable, scores, strict=True))
    if comparator is None:
        own = sorted(scored, key=lambda item: item[0].index)
        return [
            _Comparison(first, second, second_score, first_score - second_score)
            for position, (first, first_score) in enumerate(own)
            for second, second_score in own[position + 1 :]
        ]
    others = sum(not response.dropped for response in comparator)
    own = sorted(scored[: len(scored) - others], key=lambda item: item[0].index)
    other = {response.index: (response, score) for response, score in scored[len(scored) - others :]}
    return [
        _Comparison(first, *other[first.index], score - other[first.index][1])
        for first, score in own
        if first.index in other
    ]


def _refusal(comparison: _Comparison, minimum: int) -> str | None:
    """Why a comparison gives no pair (the name of its counter), or None."""
    if comparison.first.texts == comparison.second.texts:
        return "duplicates"
    if comparison.gap == 0:
        return "ties"
    return "near_ties" if abs(comparison.gap) < minimum else None


def _ordered(kept: list[_Comparison], selection: str, stream: tuple[int | str, ...]) -> list[_Comparison]:
    """`kept` comes in index order, and sorting is stable: what is equal stays in that order."""
    if selection == "reward_gap":
        return sorted(kept, key=lambda comparison: -abs(comparison.gap))
    if selection == "comparator_reward":
        return sorted(kept, key=lambda comparison: (-comparison.second_score, -abs(comparison.gap)))
    if selection == "random":
        return [kept[position] for position in generator(*stream).permutation(len(kept))]
    return kept


def _record(
    task: TaskCandidates, comparison: _Comparison, mean: float, iterative: bool, oracle: str | None
) -> PairRecord:
    first_wins = comparison.gap > 0
    first, second = comparison.first, comparison.second
    winner, loser = (first, second) if first_wins else (second, first)
    raw = (_given(winner.raw_reward, winner), _given(loser.raw_reward, loser))
    return PairRecord(
        prompts=task.prompts,
        winner_completions=winner.texts,
        loser_completions=loser.texts,
        winner_reward=_given(winner.reward, winner),
        loser_reward=_given(loser.reward, loser),
        candidate_reward_mean=mean,
        raw_rewards=raw if iterative else None,
        target_raw_reward=first.raw_reward if iterative else None,
        comparator_raw_reward=second.raw_reward if iterative else None,
        task_id=task.task_id,
        candidate_index=first.index if iterative else (winner.index, loser.index),
        winner_source=CURRENT if first_wins or not iterative else COMPARATOR,
        oracle=oracle,
        winner_finished=_finished(winner.completions),
        loser_finished=_finished(loser.completions),
        winner_token_ids=_token_ids(winner.completions),
        loser_token_ids=_token_ids(loser.completions),
    )


def _given(reward: float | None, response: JointResponse) -> float:
    if reward is None:
        raise DataError(f"candidate {response.index} ({response.source}) has no raw reward; score it first")
    return reward


def _finished(completions: tuple[Completion, ...]) -> tuple[bool, ...]:
    return tuple(completion.finished for completion in completions)


def _token_ids(completions: tuple[Completion, ...]) -> TokenIds | None:
    ids = tuple(completion.token_ids for completion in completions)
    return None if all(one is None for one in ids) else ids
