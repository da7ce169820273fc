"""Task sets from every source, with ids that stay."""

import datetime
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comlrl_core.environments.tasks import load_tasks, make_builtin_tasks, read_tasks, write_tasks
from comlrl_core.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
ROWS = [{"prompt": "one", "target": 1}, {"prompt": "two", "target": 2}, {"prompt": "three", "target": 3}]


def endless() -> Any:
    return ({"prompt": f"p{i}"} for i in itertools.count())


def test_every_kind_of_source_gives_the_same_rows_and_ids(tmp_path: Path) -> None:
    """Pitfall 36: a list of dicts and an `IterableDataset` work like a `Dataset`; files too."""
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{row["prompt"]}", "target": {row["target"]}}}\n' for row in ROWS)
    )
    expected = load_tasks(ROWS)
    assert [row["prompt"] for row in expected] == ["one", "two", "three"]
    assert len({row["task_id"] for row in expected}) == 3
    sources = [tuple(ROWS), iter(ROWS), dataset, dataset.to_iterable_dataset()]
    for source in [*sources, tmp_path / "rows.jsonl", str(tmp_path / "rows.parquet"), str(tmp_path)]:
        assert load_tasks(source) == expected, source
    assert "task_id" not in ROWS[0]  # the given rows stay as they are


def test_an_endless_dataset_is_read_as_far_as_the_limit() -> None:
    """Pitfall 36: it has no length."""
    stream = datasets.IterableDataset.from_generator(endless)
    assert [row["prompt"] for row in load_tasks(stream, limit=3)] == ["p0", "p1", "p2"]
    assert len(load_tasks(ROWS, limit=2)) == 2


def test_csv_values_are_text_and_quoting_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffprompt,target\r\n"one, ""two""\nthree",1\r\n\r\nfour,\r\n'.encode())
    rows = load_tasks(path)
    assert [(row["prompt"], row["target"]) for row in rows] == [('one, "two"\nthree', "1"), ("four", "")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,target\none\n", r"rows\.csv: line 2: 1 values for the 2 columns prompt, target"),
        ("prompt,prompt\none,two\n", "line 1: expected distinct column names"),
        ('prompt\n"one\n', "not a whole CSV file"),
        ("prompt\n", "there are no tasks in it"),
        ("", "there are no tasks in it|line 1"),
    ],
)
def test_a_broken_csv_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        load_tasks(tmp_path / "rows.csv")


def test_slices(tmp_path: Path) -> None:
    write_tasks(tmp_path / "rows.jsonl", [{"task_id": str(i)} for i in range(5)])
    name = str(tmp_path / "rows.jsonl")
    assert [row["task_id"] for row in load_tasks(f"{name}[1:3]")] == ["1", "2"]
    assert [row["task_id"] for row in load_tasks(f"{name}[-2:]")] == ["3", "4"]
    assert [row["task_id"] for row in load_tasks(f"{tmp_path}[train[:2]]")] == ["0", "1"]
    assert [row["task_id"] for row in load_tasks(f"{tmp_path}[:2]")] == ["0", "1"]
    with pytest.raises(DataError, match="a file has no splits"):
        load_tasks(f"{name}[test]")


def test_given_ids_are_kept_and_numbers_become_text() -> None:
    rows = load_tasks([{"task_id": "HumanEval/0"}, {"task_id": 7}, {"task_id": None, "prompt": "x"}])
    assert [row["task_id"] for row in rows[:2]] == ["HumanEval/0", "7"] and len(rows[2]["task_id"]) == 16


def test_an_id_follows_the_contents_not_the_place() -> None:
    first, _, third = (row["task_id"] for row in load_tasks(ROWS))
    assert [row["task_id"] for row in load_tasks([ROWS[2], ROWS[0]])] == [third, first]
    reordered = [{"target": 1, "prompt": "one"}]
    assert load_tasks(reordered)[0]["task_id"] == first


def test_equal_rows_are_told_apart_by_a_number() -> None:
    ids = [row["task_id"] for row in load_tasks([ROWS[0], ROWS[1], ROWS[0], ROWS[0]])]
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"task_id": "a"}, {"task_id": "a"}], r"row 1: task_id 'a' was given before \(tasks: row 0\)"),
        ([{"task_id": ""}], "row 0: field 'task_id': expected a string"),
        ([{"task_id": True}], "row 0: field 'task_id'"),
        (["prompt"], "row 0: expected a mapping of fields, found str"),
        ([{"x": math.nan}], "row 0: field 'x': nan"),
        ([{"x": b"bytes"}], "row 0: field 'x': a bytes cannot be kept"),
        ([{1: "x"}], "row 0: the field name 1 is not a string"),
        ([], "there are no tasks in it"),
        ({"train": []}, "found a mapping with train; choose one split"),
        (7, "expected rows, a file or a data set name, found int"),
    ],
)
def test_bad_rows_are_named(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(rows)


def test_values_of_libraries_become_plain(tmp_path: Path) -> None:
    row = {
        "a": np.float32(0.5),
        "b": np.array([[1, 2]]),
        "c": (1, "x"),
        "d": datetime.date(2024, 2, 3),
        "e": {"f": np.int64(3), "g": None},
        "h": np.bool_(True),
    }
    (loaded,) = load_tasks([row])
    expected = {"a": 0.5, "b": [[1, 2]], "c": [1, "x"], "d": "2024-02-03", "e": {"f": 3, "g": None}}
    assert loaded == {**expected, "h": True, "task_id": loaded["task_id"]}
    assert read_tasks(write_tasks(tmp_path / "t.jsonl", [loaded])) == [loaded]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.jsonl", "absent.jsonl: there is no such task file"),
        ("notes.txt", r"notes.txt: \.txt is no kind of task file; allowed: \.jsonl, \.csv, \.parquet"),
        ("torn.jsonl", "torn.jsonl: line 2 column"),
        ("torn.parquet", "torn.parquet: not a whole Parquet file"),
        ("no_such_folder_or_set", "no_such_folder_or_set: is no task file"),
        ("builtin:length_ratio", "is made, not loaded"),
    ],
)
def test_sources_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", _offline)
    Path("notes.txt").write_text("x")
    Path("torn.jsonl").write_text('{"a": 1}\n{"a": ')
    Path("torn.parquet").write_bytes(b"PAR1....")
    with pytest.raises(DataError, match=message):
        load_tasks(source)


def _offline(name: str, split: str) -> Any:
    raise FileNotFoundError(f"{name} is not here")


def test_a_hub_name_takes_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> Any:
        asked.append((name, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in (
        "org/set",
        "org/set[test]",
        "org/set[train[:256]]",
        "org/set[:8]",
        "org/set[train[10%:]+test]",
    ):
        assert len(load_tasks(name)) == 3
    splits = ["train", "test", "train[:256]", "train[:8]", "train[10%:]+test"]
    assert asked == [("org/set", split) for split in splits]


def test_task_files_are_checked_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert read_tasks(write_tasks(path, [])) == []
    with pytest.raises(DataError, match=r"t\.jsonl: line 1: field 'task_id'"):
        write_tasks(path, [{"prompt": "x"}])
    with pytest.raises(DataError, match="line 2: task_id 'a' was given before"):
        write_tasks(path, [{"task_id": "a"}, {"task_id": "a"}])
    path.write_text('{"task_id": "a"}\n{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"t\.jsonl: line 2: field 'task_id'"):
        read_tasks(path)


def test_builtin_sets_by_name() -> None:
    train, held_out = make_builtin_tasks("builtin:writing_prompts", 3, 2, seed=1)
    assert (len(train), len(held_out)) == (3, 2)
    train, held_out = make_builtin_tasks("writing_prompts", None, None)
    assert (len(train), len(held_out)) == (16, 8)
    with pytest.raises(ConfigError, match="allowed: builtin:length_ratio, builtin:writing_prompts"):
        make_builtin_tasks("builtin:poems", 1, 1)
