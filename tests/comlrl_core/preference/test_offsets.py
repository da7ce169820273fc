"""Offsets of pairs: the same pairs as reading the whole file, without reading it."""

import json
import os
from pathlib import Path

import pytest

from comlrl_core.errors import DataError
from comlrl_core.preference import offsets
from comlrl_core.preference.files import iteration_path, read_iteration, write_iteration
from comlrl_core.preference.offsets import FOLDER, open_pairs
from comlrl_core.preference.records import PairRecord


def record(number: int) -> PairRecord:
    return PairRecord(
        prompts=(f"prompt {number}", "größer\n]}"),
        winner_completions=("a" * (number % 7), "é"),
        loser_completions=("b", f"{number}"),
        winner_reward=1.0,
        loser_reward=0.25,
        candidate_reward_mean=0.5,
        task_id=f"task {number}",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_iteration(tmp_path, 3, [record(n) for n in range(25)], {"seed": 1})
    return iteration_path(tmp_path, 3)


def test_takes_the_pairs_that_reading_the_file_gives_in_the_order_asked_for(path: Path) -> None:
    whole = read_iteration(path)
    pairs = open_pairs(path)
    assert len(pairs) == 25
    assert pairs.take([24, 0, 7, 7]) == [whole[24], whole[0], whole[7], whole[7]]


def test_second_opening_reads_the_offsets_and_not_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_pairs(path)
    monkeypatch.setattr(offsets, "_find", lambda path: pytest.fail("the file was read again"))
    assert open_pairs(path).take([3]) == [record(3)]


def test_offsets_of_a_file_that_changed_are_made_anew(path: Path) -> None:
    open_pairs(path)
    write_iteration(path.parent, 3, [record(n) for n in range(100, 104)], {"seed": 1})
    assert open_pairs(path).take([3]) == [record(103)]
    assert len(open_pairs(path)) == 4


def test_damaged_offsets_are_made_anew(path: Path) -> None:
    open_pairs(path)
    (path.parent / FOLDER / "iteration_0003.npy").write_bytes(b"not an array")
    assert open_pairs(path).take([1]) == [record(1)]


def test_a_file_of_another_layout_is_read_whole(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    pairs = open_pairs(path)
    assert pairs.offsets is None
    assert pairs.take([2]) == [record(2)]


def test_an_empty_iteration_has_no_pairs(tmp_path: Path) -> None:
    write_iteration(tmp_path, 1, [], {})
    assert len(open_pairs(iteration_path(tmp_path, 1))) == 0


@pytest.mark.parametrize("cut", [10, 60, 400, -2])
def test_torn_file_is_refused_by_name(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"iteration_0003\.json"):
        open_pairs(path)


def test_a_bad_record_is_named_when_the_file_is_first_opened(path: Path) -> None:
    path.write_text(path.read_text().replace('"winner_reward": 1.0', '"winner_reward": "high"', 1))
    with pytest.raises(DataError, match=r"record 0.*winner_reward"):
        open_pairs(path)


def test_a_record_that_changed_under_unchanged_offsets_is_validated_when_it_is_read(path: Path) -> None:
    status = path.stat()
    open_pairs(path)
    path.write_text(path.read_text().replace('"winner_reward": 1.0', '"winner_reward": "x"', 1).replace("]}\n", "]}\n"))
    data = path.read_bytes()
    assert len(data) == status.st_size, "the replacement keeps the length"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="record 0"):
        open_pairs(path).take([0])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"iteration_0009\.json"):
        open_pairs(tmp_path / "iteration_0009.json")
