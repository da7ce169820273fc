"""Pair records: the published format, our fields, and every way to be wrong."""

from typing import Any

import pytest

from comlrl_core.errors import DataError
from comlrl_core.preference.records import PairRecord, from_json, to_json

PUBLISHED: dict[str, Any] = {
    "prompts": ["p1", "p2"],
    "winner_completions": ["a", "b"],
    "loser_completions": ["c", "d"],
    "winner_reward": 0.92,
    "loser_reward": 0.41,
    "candidate_reward_mean": 0.63,
    "raw_rewards": [0.92, 0.41],
    "target_raw_reward": 0.92,
    "comparator_raw_reward": 0.41,
}
OURS: dict[str, Any] = {
    "task_id": "t0",
    "candidate_index": 4,
    "winner_source": "current",
    "oracle": "length_ratio@12ab",
    "finished": {"winner": [True, False], "loser": [True, True]},
    "winner_token_ids": [[5, 6, 2], [7]],
    "loser_token_ids": [[8, 2], [9, 2]],
}
FULL = {**PUBLISHED, **OURS}


def test_a_full_record_comes_back_field_for_field() -> None:
    record = from_json(FULL, "f")
    assert to_json(record) == FULL
    assert list(to_json(record))[:9] == list(PUBLISHED)
    assert from_json(to_json(record), "f") == record


def test_ids_are_kept_and_not_made_again_from_text() -> None:
    """Pitfall 4: the ids are what was sampled, the cut-off answer has no end-of-sequence id at its end."""
    record = from_json(FULL, "f")
    assert record.has_token_ids
    assert record.token_ids("winner", 1) == (7,)
    assert not record.finished("winner", 1) and record.finished("loser", 1)


def test_a_record_of_the_published_format_says_that_it_has_no_ids() -> None:
    record = from_json(PUBLISHED, "f")
    assert not record.has_token_ids
    assert record.token_ids("winner", 0) is None
    assert record.finished("winner", 0)
    assert to_json(record) == PUBLISHED


def test_one_side_of_text_alone_is_no_record_with_ids() -> None:
    record = from_json({**FULL, "loser_token_ids": [None, None]}, "f")
    assert not record.has_token_ids and record.token_ids("winner", 0) == (5, 6, 2)
    del (value := dict(FULL))["loser_token_ids"]
    assert not from_json(value, "f").has_token_ids


def test_offline_records_leave_the_raw_rewards_out() -> None:
    offline = {key: value for key, value in PUBLISHED.items() if "raw" not in key} | {"candidate_index": [3, 1]}
    record = from_json(offline, "f")
    assert record.raw_rewards is None and record.candidate_index == (3, 1)
    assert to_json(record) == offline


def test_one_flag_for_the_whole_record_is_read() -> None:
    record = from_json({**PUBLISHED, "finished": False}, "f")
    assert not record.finished("winner", 0) and not record.finished("loser", 1)
    assert to_json(record)["finished"] == {"winner": [False, False], "loser": [False, False]}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("prompts", [], "field 'prompts': expected at least one"),
        ("prompts", "p", "field 'prompts': expected a list of strings"),
        ("winner_completions", ["a"], r"field 'winner_completions': expected 2 \(one per agent\), found 1"),
        ("loser_completions", ["a", "b"], "field .loser_completions.: both sides have the same joint text"),
        ("loser_completions", ["a", 3], "field 'loser_completions': expected a list of strings"),
        ("winner_reward", "0.92", "field 'winner_reward': expected a finite number, found '0.92'"),
        ("winner_reward", True, "field 'winner_reward': expected a finite number"),
        ("winner_reward", float("nan"), "field 'winner_reward': expected a finite number"),
        ("winner_reward", 10**400, "field 'winner_reward': expected a finite number"),
        ("winner_reward", 0.41, "field 'winner_reward': the winner must score higher"),
        ("winner_reward", 0.4, "field 'winner_reward': the winner must score higher"),
        ("candidate_reward_mean", None, "field 'candidate_reward_mean'"),
        ("raw_rewards", [0.92], "field 'raw_rewards'"),
        ("raw_rewards", [0.41, 0.92], "field 'raw_rewards'"),
        ("target_raw_reward", 0.5, "field 'raw_rewards'"),
        ("task_id", "", "field 'task_id'"),
        ("candidate_index", -1, "field 'candidate_index'"),
        ("candidate_index", [1, 2, 3], "field 'candidate_index'"),
        ("winner_source", "api", "field 'winner_source': 'api' is unknown; allowed: current, comparator"),
        ("winner_source", "comparator", "field 'raw_rewards'"),
        ("finished", "no", "field 'finished'"),
        ("finished", {"winner": [True]}, "field 'finished': expected 2 of true or false for the winner"),
        ("finished", {"victor": [True, True]}, "field .finished.: field .victor. is unknown"),
        ("winner_token_ids", [[1]], r"field 'winner_token_ids': expected 2 \(one per agent\)"),
        ("winner_token_ids", [[1], []], "field 'winner_token_ids': expected a list of token ids"),
        ("loser_token_ids", [[1], [2.0]], "field 'loser_token_ids': expected token ids"),
        ("score", 1, "field 'score' is unknown; allowed: prompts"),
    ],
)
def test_a_wrong_field_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"here: {message}"):
        from_json({**FULL, key: value}, "here")


@pytest.mark.parametrize("key", ["prompts", "loser_reward", "candidate_reward_mean", "target_raw_reward"])
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(DataError, match=f"field '{key}' is missing"):
        from_json({name: value for name, value in FULL.items() if name != key}, "here")


def test_a_bad_record_is_refused_before_it_is_written() -> None:
    record = PairRecord(("p",), ("a",), ("b",), 1.0, 1.0, 1.0)
    with pytest.raises(DataError, match="the winner must score higher"):
        to_json(record)
