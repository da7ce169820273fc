from typing import Any
from uuid import UUID

import pytest

from comlrl_core.preference.records import PairRecord
from flows import artifacts
from flows.artifacts import (
    SHOWN_CHARACTERS,
    SHOWN_PAIRS,
    publish_pairs_table,
    publish_progress,
    shortened,
    summary_markdown,
)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    made: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    monkeypatch.setattr(artifacts, "create_table_artifact", lambda rows, **about: made.append((rows, about)))
    return made


def record(number: int) -> PairRecord:
    return PairRecord(
        prompts=("Say it\nshortly", "Say it"),
        winner_completions=("yes", "no " * 200),
        loser_completions=("a", "b"),
        winner_reward=0.91234,
        loser_reward=0.4,
        candidate_reward_mean=0.6,
        task_id=f"task-{number}",
    )


def test_some_pairs_of_an_iteration_are_shown(tables: list[tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    publish_pairs_table(3, [record(number) for number in range(50)])
    ((rows, about),) = tables
    assert about["key"] == "pairs-0003"  # Prefect allows lower case, digits and dashes
    assert len(rows) == SHOWN_PAIRS
    assert rows[0]["task"] == "task-0" and rows[0]["prompt"] == "Say it shortly"
    assert rows[0]["rewards"] == "0.912 > 0.400"
    assert all(len(str(cell)) <= SHOWN_CHARACTERS for row in rows for cell in row.values())


def test_an_iteration_without_pairs_says_so(tables: list[tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    publish_pairs_table(1, [])
    assert tables[0][0] == [{"task": "no pairs in this iteration"}]


def test_a_bar_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def create(progress: float, **about: Any) -> UUID:
        said.append((progress, about["key"], about["description"]))
        return UUID(int=1)

    def move(artifact: UUID, progress: float, **about: Any) -> UUID:
        said.append((artifact, progress, about["description"]))
        return artifact

    monkeypatch.setattr(artifacts, "create_progress_artifact", create)
    monkeypatch.setattr(artifacts, "update_progress_artifact", move)
    first = publish_progress(0, 4, None)
    publish_progress(3, 4, first)
    assert said == [(0.0, "iterations", "0 of 4 iterations"), (UUID(int=1), 75.0, "3 of 4 iterations")]


def test_long_texts_are_cut_and_put_on_one_line() -> None:
    assert shortened(" a\n\tb ") == "a b"
    assert shortened("x" * SHOWN_CHARACTERS) == "x" * SHOWN_CHARACTERS
    assert shortened("x" * (SHOWN_CHARACTERS + 1)) == "x" * (SHOWN_CHARACTERS - 1) + "…"


def test_the_summary_is_a_table_with_links() -> None:
    rows = [
        {"iteration": 0.0, "eval_reward_mean": 0.4, "eval_reward_se": 0.01},
        {"iteration": 1.0, "eval_reward_mean": 0.5, "eval_reward_se": 0.02, "eval_win_rate_initial": 0.75},
    ]
    lines = summary_markdown(rows, {"MLflow": "http://127.0.0.1:5000"}).splitlines()
    assert lines[2] == "| 0 | 0.400 ± 0.010 |  |"
    assert lines[3] == "| 1 | 0.500 ± 0.020 | 0.75 |"
    assert lines[-1] == "- [MLflow](http://127.0.0.1:5000)"
    assert summary_markdown([], {}).startswith("| iteration |")
