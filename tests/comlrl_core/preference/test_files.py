"""Iteration files: the published form, whole or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.errors import DataError
from comlrl_core.files import sha256_file
from comlrl_core.preference.files import (
    iteration_path,
    list_iterations,
    meta_path,
    read_iteration,
    read_meta,
    write_iteration,
)
from comlrl_core.preference.records import PairRecord

PAIRS = [
    PairRecord(("p", "q"), ("a\n\u2028", "b"), ("c", "é😀"), 0.1 + 0.2, -1 / 3, 0.0, task_id=f"t{i}") for i in range(3)
]


def test_the_published_keys_and_exact_floats(tmp_path: Path) -> None:
    path, beside = write_iteration(tmp_path, 1, PAIRS, {"seed": 0})
    assert (path, beside) == (tmp_path / "iteration_0001.json", tmp_path / "iteration_0001.meta.json")
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert list(plain) == ["iteration", "num_pairs", "pairs"]
    assert (plain["iteration"], plain["num_pairs"], len(plain["pairs"])) == (1, 3, 3)
    assert read_iteration(path) == PAIRS
    assert read_meta(tmp_path, 1) == {
        "iteration": 1,
        "num_pairs": 3,
        "pairs_sha256": sha256_file(path),
        "seed": 0,
    }


def test_the_same_pairs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_iteration(tmp_path / name, 2, PAIRS, {"b": 1, "a": 2}) for name in "xy")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_no_pairs_is_a_valid_file(tmp_path: Path) -> None:
    path, _ = write_iteration(tmp_path, 3, [], {})
    assert json.loads(path.read_text()) == {"iteration": 3, "num_pairs": 0, "pairs": []}
    assert read_iteration(path) == []


def test_a_file_of_the_published_tool_is_read(tmp_path: Path) -> None:
    record = {
        "prompts": ["p"],
        "winner_completions": ["a"],
        "loser_completions": ["b"],
        "winner_reward": 1,
        "loser_reward": 0,
        "candidate_reward_mean": 0.5,
    }
    path = tmp_path / "iteration_0004.json"
    path.write_text(json.dumps({"iteration": 4, "num_pairs": 1, "pairs": [record]}, indent=4))
    (found,) = read_iteration(path)
    assert not found.has_token_ids and found.winner_reward == 1.0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, share: float) -> None:
    """Pitfall 28."""
    path, _ = write_iteration(tmp_path, 1, PAIRS, {})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"iteration_0001\.json: .*(not valid JSON|not UTF-8)"):
        read_iteration(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("iteration", 2, "field 'iteration': 2 contradicts the file's name"),
        ("iteration", "1", "field 'iteration': expected an integer"),
        ("num_pairs", 2, "field 'num_pairs': says 2, but there are 3"),
        ("pairs", {}, "field 'pairs': expected a list"),
        ("version", 1, "field 'version' is unknown"),
    ],
)
def test_a_foreign_or_edited_file_is_refused_by_field(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path, _ = write_iteration(tmp_path, 1, PAIRS, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DataError, match=rf"iteration_0001\.json: {message}"):
        read_iteration(path)


def test_one_bad_record_is_named_and_not_skipped(tmp_path: Path) -> None:
    path, _ = write_iteration(tmp_path, 1, PAIRS, {})
    value = json.loads(path.read_text())
    value["pairs"][2]["loser_reward"] = None
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"iteration_0001\.json: record 2: field 'loser_reward'"):
        read_iteration(path)


def test_nan_is_refused_on_both_ways(tmp_path: Path) -> None:
    bad = PairRecord(("p",), ("a",), ("b",), float("nan"), 0.0, 0.0)
    with pytest.raises(DataError, match=r"iteration_0001\.json: record 1: field 'winner_reward'"):
        write_iteration(tmp_path, 1, [PAIRS[0], bad], {})
    with pytest.raises(DataError, match="field mean: nan"):
        write_iteration(tmp_path, 1, PAIRS, {"mean": float("nan")})
    assert list(tmp_path.iterdir()) == []
    path, _ = write_iteration(tmp_path, 1, PAIRS, {})
    path.write_text(path.read_text().replace('"candidate_reward_mean": 0.0', '"candidate_reward_mean": NaN'))
    with pytest.raises(DataError, match=r"iteration_0001\.json: line 2 column \d+: NaN"):
        read_iteration(path)


def test_a_refused_rewrite_leaves_the_old_pair_of_files(tmp_path: Path) -> None:
    path, beside = write_iteration(tmp_path, 1, PAIRS, {"seed": 0})
    before = path.read_bytes(), beside.read_bytes()
    with pytest.raises(DataError):
        write_iteration(tmp_path, 1, [PairRecord(("p",), ("a",), ("a",), 1.0, 0.0, 0.5)], {})
    assert (path.read_bytes(), beside.read_bytes()) == before


def test_meta_notices_that_its_pairs_were_changed(tmp_path: Path) -> None:
    path, _ = write_iteration(tmp_path, 1, PAIRS, {})
    path.write_text(path.read_text().replace("t0", "t9"))
    assert len(read_iteration(path)) == 3
    with pytest.raises(DataError, match=r"iteration_0001\.json was changed"):
        read_meta(tmp_path, 1)


def test_names_and_listing(tmp_path: Path) -> None:
    for number in (12, 3, 10_000):
        write_iteration(tmp_path, number, [], {})
    (tmp_path / ".iteration_0004.json.12ab.tmp").write_text("half")
    (tmp_path / "iteration_5.json").write_text("{}")
    assert list_iterations(tmp_path) == [3, 12, 10_000]
    assert list_iterations(tmp_path / "absent") == []
    assert iteration_path("r", 7) == Path("r/iteration_0007.json")
    assert meta_path("r", 7) == Path("r/iteration_0007.meta.json")
    with pytest.raises(DataError, match="counted from 1"):
        write_iteration(tmp_path, 0, [], {})
