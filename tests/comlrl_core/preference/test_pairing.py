"""Pairs from candidates, counted and ordered by hand."""

from typing import Any

import pytest

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.preference.files import read_iteration, write_iteration
from comlrl_core.preference.pairing import PairingResult, make_pairs
from comlrl_core.preference.records import to_json


def joint(index: int, reward: float | None, text: str | None = None, source: str = "current") -> JointResponse:
    words = (text or f"{source} {index}", "second")
    completions = (Completion(words[0], (index + 10, 2), True), Completion(words[1], (7,), False))
    raw = None if reward is None else reward * 10
    return JointResponse(index, source, completions, raw, reward, dropped=reward is None)


def offline(*rewards: float | None, task_id: str = "t") -> TaskCandidates:
    return TaskCandidates(task_id, {}, ("p1", "p2"), [joint(i, r) for i, r in enumerate(rewards)])


def versus(own: dict[int, float | None], other: dict[int, float | None], task_id: str = "t") -> TaskCandidates:
    return TaskCandidates(
        task_id,
        {},
        ("p1", "p2"),
        [joint(i, r) for i, r in own.items()],
        [joint(i, r, source="model") for i, r in other.items()],
    )


def pair(*tasks: TaskCandidates, **options: Any) -> PairingResult:
    settings: dict[str, Any] = {"selection": "reward_gap", "pairs_per_sample": None, "iterative": False}
    result = make_pairs(tasks, **(settings | options))
    c = result.counts
    refused = c["duplicates"] + c["ties"] + c["near_ties"] + c["not_selected"]
    assert c["pairs_possible"] == refused + c["pairs"] and c["pairs"] == len(result.records)
    for record in result.records:
        to_json(record)  # every pair is one that a file accepts
    return result


def indices(result: PairingResult) -> list[Any]:
    return [record.candidate_index for record in result.records]


def test_offline_takes_each_unordered_pair_once_largest_gap_first() -> None:
    """Rewards .1 .9 .5 .5: gaps 01 .8, 02 .4, 03 .4, 12 .4, 13 .4, 23 tie. Their mean is 2 / 4."""
    result = pair(offline(0.1, 0.9, 0.5, 0.5))
    assert indices(result) == [(1, 0), (2, 0), (3, 0), (1, 2), (1, 3)]
    assert result.counts == {
        "tasks": 1,
        "tasks_without_pairs": 0,
        "candidates": 4,
        "dropped": 0,
        "unmatched": 0,
        "pairs_possible": 6,
        "duplicates": 0,
        "ties": 1,
        "near_ties": 0,
        "not_selected": 0,
        "pairs": 5,
    }
    first = result.records[0]
    assert (first.winner_reward, first.loser_reward, first.candidate_reward_mean) == (0.9, 0.1, 0.5)
    assert first.raw_rewards is first.target_raw_reward is first.comparator_raw_reward is None
    assert first.winner_source == "current"
    assert indices(pair(offline(0.1, 0.9, 0.5, 0.5), pairs_per_sample=2)) == [(1, 0), (2, 0)]


def test_records_keep_the_sampled_ids_and_how_each_answer_ended() -> None:
    """Pitfall 4."""
    record = pair(offline(0.0, 1.0), oracle="judge@1").records[0]
    assert record.winner_token_ids == ((11, 2), (7,)) and record.loser_token_ids == ((10, 2), (7,))
    assert record.winner_finished == (True, False)
    assert (record.oracle, record.task_id, record.prompts) == ("judge@1", "t", ("p1", "p2"))


def test_an_answer_of_text_alone_has_no_ids_in_the_record() -> None:
    api = JointResponse(0, "api", (Completion("x", None, True), Completion("y", None, True)), 0.0, 0.0)
    task = TaskCandidates("t", {}, ("p1", "p2"), [joint(0, 1.0)], [api])
    record = pair(task, iterative=True).records[0]
    assert record.loser_token_ids is None and record.winner_token_ids is not None and not record.has_token_ids


def test_iterative_compares_equal_indices_and_either_side_wins() -> None:
    """Own .5 .2 .9 at 0 1 2, comparator .4 .8 at 0 1 and .1 at 5: own wins at 0, the comparator at 1.

    Indices 2 and 5 stand alone. The mean is over all six: (.5 + .2 + .9 + .4 + .8 + .1) / 6 = 2.9 / 6.
    """
    result = pair(versus({0: 0.5, 1: 0.2, 2: 0.9}, {0: 0.4, 1: 0.8, 5: 0.1}), iterative=True)
    assert indices(result) == [1, 0]  # gaps .6 and .1
    assert result.counts["pairs_possible"] == 2 and result.counts["unmatched"] == 2
    lost, won = result.records
    assert (lost.winner_source, won.winner_source) == ("comparator", "current")
    assert lost.winner_completions[0] == "model 1" and lost.loser_completions[0] == "current 1"
    assert (lost.raw_rewards, lost.target_raw_reward, lost.comparator_raw_reward) == ((8.0, 2.0), 2.0, 8.0)
    assert (won.raw_rewards, won.target_raw_reward, won.comparator_raw_reward) == ((5.0, 4.0), 5.0, 4.0)
    assert lost.candidate_reward_mean == won.candidate_reward_mean == pytest.approx(2.9 / 6, abs=1e-15)


def test_comparator_reward_then_gap_then_index() -> None:
    """Comparator .5 .9 .5 .5, own .4 .8 .9 .6: 1 leads (.9); then, at .5, gap .4 (2) before .1 (0 and 3)."""
    task = versus({0: 0.4, 1: 0.8, 2: 0.9, 3: 0.6}, {0: 0.5, 1: 0.9, 2: 0.5, 3: 0.5})
    result = pair(task, iterative=True, selection="comparator_reward")
    assert indices(result) == [1, 2, 0, 3]
    capped = pair(task, iterative=True, selection="comparator_reward", pairs_per_sample=3)
    assert indices(capped) == [1, 2, 0] and capped.counts["not_selected"] == 1


def test_all_takes_everything_in_index_order() -> None:
    assert indices(pair(offline(0.3, 0.1, 0.2), selection="all")) == [(0, 1), (0, 2), (2, 1)]
    task = versus({1: 0.4, 0: 0.8}, {0: 0.5, 1: 0.9})
    assert indices(pair(task, iterative=True, selection="all")) == [0, 1]


def test_random_depends_on_stream_and_task_alone() -> None:
    options: dict[str, Any] = {"selection": "random", "pairs_per_sample": 3, "stream": (0, 1, "pair")}
    one, two = (offline(*range(8), task_id=name) for name in ("one", "two"))
    alone = indices(pair(one, **options))
    both = pair(two, one, **options)
    assert len(alone) == 3 and indices(both)[3:] == alone  # the other task changes nothing
    assert indices(both)[:3] != alone
    assert indices(pair(one, **(options | {"stream": (1, 1, "pair")}))) != alone


def test_random_draws_every_pair_equally_often() -> None:
    """6 pairs, one drawn, 600 streams: 100 expected each, standard deviation sqrt(600 * 5/36) = 9.1."""
    hits: dict[Any, int] = {}
    for seed in range(600):
        options: dict[str, Any] = {"selection": "random", "pairs_per_sample": 1, "stream": (seed,)}
        index = indices(pair(offline(0, 1, 2, 3), **options))[0]
        hits[index] = hits.get(index, 0) + 1
    assert len(hits) == 6 and all(abs(count - 100) < 37 for count in hits.values())


def test_a_constant_oracle_gives_no_pair_a_tie_counter_and_a_valid_empty_file(tmp_path) -> None:
    """Pitfall 21: 3 candidates are 3 comparisons, all ties; 2 indices against the comparator are 2."""
    result = pair(offline(1.0, 1.0, 1.0))
    assert result.records == [] and result.counts["ties"] == 3 and result.counts["tasks_without_pairs"] == 1
    versus_result = pair(versus({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}), iterative=True)
    assert versus_result.records == [] and versus_result.counts["ties"] == 2
    path, _ = write_iteration(tmp_path, 1, result.records, {"counts": result.counts})
    assert read_iteration(path) == []


def test_equal_joint_texts_never_pair_even_if_the_oracle_likes_one_more() -> None:
    """One text in common is no duplicate: all candidates here share their second text."""
    candidates = [joint(0, 0.1, "same"), joint(1, 0.9, "same"), joint(2, 0.5)]
    task = TaskCandidates("t", {}, ("p1", "p2"), candidates)
    result = pair(task)
    assert result.counts["duplicates"] == 1 and indices(result) == [(2, 0), (1, 2)]


def test_gaps_are_exact_decimals() -> None:
    """0.3 - 0.2 in floats is 0.09999999999999998; as written, it is the minimum itself."""
    result = pair(offline(0.3, 0.2, 0.1), min_reward_gap=0.1)
    assert len(result.records) == 3 and result.counts["near_ties"] == 0
    result = pair(offline(0.3, 0.2, 0.15), min_reward_gap=0.1)
    assert indices(result) == [(0, 2), (0, 1)] and result.counts["near_ties"] == 1
    # 0.1 + 0.2 is above 0.3 by one unit in the last place: different floats, no tie.
    assert pair(offline(0.1 + 0.2, 0.3)).counts["ties"] == 0
    # 1e16 + 1 cannot be told from 1e16 after a float subtraction of 1; the exact gaps 1e16 and 1e16 - 1 can.
    assert indices(pair(offline(0.0, 1.0, 1e16)))[:2] == [(2, 0), (2, 1)]
    assert pair(offline(0.0, -0.0)).counts["ties"] == 1


def test_equal_gaps_are_ordered_by_index_not_by_rounding() -> None:
    """.7 - .6 and .2 - .1 round differently in floats (0.09999999999999998 and 0.1); both are a tenth."""
    task = versus({0: 0.7, 1: 0.2}, {0: 0.6, 1: 0.1})
    assert indices(pair(task, iterative=True)) == [0, 1]


def test_a_dropped_candidate_leaves_pairs_and_mean_alone() -> None:
    """Pitfall 13: candidate 1 had no usable reward; the mean is (.2 + .6) / 2."""
    result = pair(offline(0.2, None, 0.6))
    assert indices(result) == [(2, 0)] and result.counts["dropped"] == 1
    assert result.records[0].candidate_reward_mean == 0.4
    iterative = pair(versus({0: 0.2, 1: None}, {0: 0.6, 1: 0.9}), iterative=True)
    assert indices(iterative) == [0] and iterative.counts["unmatched"] == 1
    assert iterative.records[0].candidate_reward_mean == pytest.approx((0.2 + 0.6 + 0.9) / 3)


def test_the_mean_of_huge_rewards_does_not_overflow() -> None:
    assert pair(offline(1.7e308, 1.5e308)).records[0].candidate_reward_mean == 1.6e308


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "comparator_reward"}, "pair_selection: 'comparator_reward' is not possible here"),
        ({"selection": "gap"}, "pair_selection: 'gap'"),
        ({"selection": "all", "pairs_per_sample": 4}, "preference_pairs_per_sample: must be null with"),
        ({"pairs_per_sample": 0}, "preference_pairs_per_sample: must be null or at least 1"),
        ({"min_reward_gap": -0.1}, "min_reward_gap"),
        ({"min_reward_gap": float("nan")}, "min_reward_gap"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair(offline(0, 1), **options)


def test_candidates_that_do_not_fit_are_refused() -> None:
    unscored = TaskCandidates("t7", {}, ("p",), [JointResponse(0, "current", (Completion("x", (1,), True),))])
    with pytest.raises(DataError, match=r"'t7': candidate 0 \(current\) has no reward"):
        pair(unscored)
    with pytest.raises(DataError, match="there are no comparator candidates"):
        pair(offline(0, 1), iterative=True)
    with pytest.raises(DataError, match="for iterative pairing alone"):
        pair(versus({0: 0.1}, {0: 0.2}))
