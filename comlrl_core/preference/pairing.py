"""From scored candidates to pairs. Ties train nothing; every candidate and comparison is accounted for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

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


@dataclass(frozen=True)
class _Comparison:
    """Two candidates of a task with exact scores; `first` is the team's (offline: the smaller index)."""

    first: JointResponse
    second: JointResponse
    first_score: Fraction
    second_score: Fraction

    @property
    def gap(self) -> Fraction:
        return abs(self.first_score - self.second_score)


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
        raise ConfigError(
            f"pair_selection: {selection!r} is not possible here; allowed: {', '.join(allowed)}"
        )
    if pairs_per_sample is not None and (selection == "all" or pairs_per_sample < 1):
        what = "null with pair_selection: all" if selection == "all" else "null or at least 1"
        raise ConfigError(f"preference_pairs_per_sample: must be {what}, got {pairs_per_sample}")
    if not 0 <= min_reward_gap < float("inf"):
        raise ConfigError(f"min_reward_gap: must be 0 or more and finite, got {min_reward_gap}")
    minimum = _exact(min_reward_gap)
    result = PairingResult()
    counts = result.counts
    for task in candidates:
        usable = _usable(task, iterative)
        every = task.responses
        counts["tasks"] += 1
        counts["candidates"] += len(every)
        counts["dropped"] += sum(response.dropped for response in every)
        comparisons = list(_comparisons(task, iterative))
        counts["pairs_possible"] += len(comparisons)
        if iterative:
            counts["unmatched"] += len(usable) - 2 * len(comparisons)
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
            scores = [_exact(response.reward) for response in usable if response.reward is not None]
            mean = float(sum(scores, Fraction(0)) / len(scores))
            result.records += [_record(task, comparison, mean, iterative, oracle) for comparison in chosen]
    return result


def _exact(value: float | None) -> Fraction:
    # repr is the shortest decimal that reads back as this float: order and equality are the floats' own.
    return Fraction(repr(float(value or 0.0)))


def _usable(task: TaskCandidates, iterative: bool) -> list[JointResponse]:
    """All candidates with a reward, of the sides that pairing looks at."""
    if iterative and task.comparator is None:
        raise DataError(f"task {task.task_id!r}: there are no comparator candidates to compare with")
    if not iterative and task.comparator is not None:
        raise DataError(f"task {task.task_id!r}: comparator candidates are for iterative pairing alone")
    for response in task.responses:
        if response.reward is None and not response.dropped:
            raise DataError(
                f"task {task.task_id!r}: candidate {response.index} ({response.source}) has no reward yet"
            )
    return [response for response in task.responses if not response.dropped]


def _comparisons(task: TaskCandidates, iterative: bool) -> Iterator[_Comparison]:
    own = sorted((r for r in task.current if not r.dropped), key=lambda r: r.index)
    scores = {response.index: _exact(response.reward) for response in own}
    if iterative:
        other = {response.index: response for response in task.comparator or [] if not response.dropped}
        for response in own:
            if (opponent := other.get(response.index)) is not None:
                yield _Comparison(response, opponent, scores[response.index], _exact(opponent.reward))
        return
    for position, first in enumerate(own):
        for second in own[position + 1 :]:
            yield _Comparison(first, second, scores[first.index], scores[second.index])


def _refusal(comparison: _Comparison, minimum: Fraction) -> str | None:
    """Why a comparison gives no pair (the name of its counter), or None."""
    if comparison.first.texts == comparison.second.texts:
        return "duplicates"
    if comparison.first_score == comparison.second_score:
        return "ties"
    return "near_ties" if comparison.gap < minimum else None


def _ordered(kept: list[_Comparison], selection: str, stream: tuple[int | str, ...]) -> list[_Comparison]:
    """`kept` comes in index order, and sorting is stable: what is equal stays in that order."""
    if selection == "reward_gap":
        return sorted(kept, key=lambda comparison: -comparison.gap)
    if selection == "comparator_reward":
        return sorted(kept, key=lambda comparison: (-comparison.second_score, -comparison.gap))
    if selection == "random":
        return [kept[position] for position in generator(*stream).permutation(len(kept))]
    return kept


def _record(
    task: TaskCandidates, comparison: _Comparison, mean: float, iterative: bool, oracle: str | None
) -> PairRecord:
    first_wins = comparison.first_score > comparison.second_score
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
