"""Training and held-out tasks by name."""

from pathlib import Path

import pytest

from comlrl_core.environments.sets import task_sets
from comlrl_core.environments.tasks import write_tasks
from comlrl_core.errors import ConfigError, DataError

BUILTIN = "builtin:length_ratio"


def rows(name: str, count: int) -> list[dict]:
    return [{"task_id": f"{name}-{i}", "prompt": f"{name} {i}"} for i in range(count)]


def test_a_builtin_set_shares_no_task_between_training_and_evaluation(tmp_path: Path) -> None:
    train, held_out = task_sets(BUILTIN, BUILTIN, 6, 4, 0, tmp_path)
    assert (len(train), len(held_out)) == (6, 4)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert task_sets(BUILTIN, None, 6, 4, 0, tmp_path) == (train, [])
    assert task_sets(BUILTIN, BUILTIN, 6, 4, 1, tmp_path)[0] != train


def test_relative_files_are_seen_from_the_project_and_cut(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "data").mkdir()
    write_tasks(tmp_path / "data" / "train.jsonl", rows("train", 5))
    write_tasks(tmp_path / "data" / "eval.jsonl", rows("eval", 5))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train, held_out = task_sets("data/train.jsonl", "data/eval.jsonl", 3, None, 0, tmp_path)
    assert train == rows("train", 3) and held_out == rows("eval", 5)
    assert task_sets("data/train.jsonl[1:3]", None, None, None, 0, tmp_path)[0] == rows("train", 3)[1:]
    assert task_sets(str(tmp_path / "data" / "train.jsonl"), None, None, None, 0, Path("x"))[0] == rows("train", 5)


def test_held_out_tasks_that_were_trained_on_are_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path / "all.jsonl", rows("all", 4))
    with pytest.raises(DataError, match=r"share 2 tasks \(all-2 \.\.\.\)"):
        task_sets("all.jsonl", "all.jsonl[2:]", None, None, 0, tmp_path)
    train, held_out = task_sets("all.jsonl[:2]", "all.jsonl[2:]", None, None, 0, tmp_path)
    assert (len(train), len(held_out)) == (2, 2)


def test_a_builtin_set_mixes_with_a_file(tmp_path: Path) -> None:
    write_tasks(tmp_path / "eval.jsonl", rows("eval", 2))
    train, held_out = task_sets(BUILTIN, "eval.jsonl", 3, None, 0, tmp_path)
    assert len(train) == 3 and held_out == rows("eval", 2)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no built-in task set"):
        task_sets("builtin:chess", None, 1, 1, 0, tmp_path)
    with pytest.raises(DataError, match=r"absent\.jsonl: there is no such task file"):
        task_sets("absent.jsonl", None, 1, 1, 0, tmp_path)
