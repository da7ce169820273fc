"""Candidate files: what is written comes back, what is broken is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.errors import DataError
from comlrl_core.preference.candidates import (
    Completion,
    JointResponse,
    TaskCandidates,
    read_candidates,
    write_candidates,
)

JOINT = JointResponse(
    index=0,
    source="current",
    completions=(Completion("a\u2028b", (5, 2), True), Completion("", None, False)),
    raw_reward=1 / 3,
    reward=0.1 + 0.2,
)
BAD = JointResponse(3, "history", JOINT.completions, raw_reward=None, dropped=True)
TASK = TaskCandidates("t0", {"task_id": "t0", "prompt": "p", "target": [1, None]}, ("p1", "p2"), [JOINT], [BAD])


def test_what_is_written_comes_back_and_bytes_repeat(tmp_path: Path) -> None:
    tasks = [TASK, TaskCandidates("t1", {}, ("x",), [], None)]
    path = write_candidates(tmp_path / "c.jsonl", tasks)
    assert read_candidates(path) == tasks
    before = path.read_bytes()
    assert write_candidates(path, read_candidates(path)).read_bytes() == before


def _set(path: list[Any], value: Any) -> Any:
    def change(row: dict) -> None:
        place: Any = row
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(["extra"], 1), "field 'extra' is unknown"),
        (lambda row: row.pop("prompts"), "field 'prompts' is missing"),
        (_set(["task_id"], 7), "field 'task_id': expected a string"),
        (_set(["row"], []), "field 'row': expected an object"),
        (_set(["current"], None), "field 'current': expected a list"),
        (
            _set(["current", 0, "reward"], "high"),
            r"field 'current'\[0\]: field 'reward': expected a finite number",
        ),
        (_set(["current", 0, "dropped"], True), "a dropped candidate has none"),
        (_set(["current", 0, "completions"], []), "expected a list of 2, one per agent"),
        (_set(["current", 0, "completions", 0, "token_ids"], []), "expected a list of token ids"),
        (_set(["current", 0, "completions", 0, "token_ids"], [1, -1]), "found -1"),
        (_set(["comparator", 0, "index"], True), "expected an integer >= 0"),
    ],
)
def test_a_changed_field_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = write_candidates(tmp_path / "c.jsonl", [TASK])
    row = json.loads(path.read_text())
    change(row)
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"c\.jsonl: line 1: .*{message}"):
        read_candidates(path)


def test_a_torn_file_and_a_task_given_twice(tmp_path: Path) -> None:
    path = write_candidates(tmp_path / "c.jsonl", [TASK])
    path.write_text(path.read_text() * 2)
    with pytest.raises(DataError, match="line 2: task 't0' is on line 1 already"):
        read_candidates(path)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(DataError, match=r"c\.jsonl: line 2 column \d+: not valid JSON"):
        read_candidates(path)
