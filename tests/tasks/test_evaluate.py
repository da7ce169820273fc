import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.files import read_json
from tasks import evaluate as module
from tasks.evaluate import (
    evaluate_iteration,
    fall,
    opponents_of,
    read_curve,
    run_summary,
    summarize_run,
    write_curve,
)
from tasks.job import Job
from tasks.loading import forget

MakeJob = Callable[..., Job]


def test_the_initial_team_has_no_opponent(prepared: MakeJob) -> None:
    metrics = evaluate_iteration.fn(prepared(), 0)
    assert 0 <= metrics["eval/reward_mean"] <= 1
    assert metrics["eval/tasks"] == 2 and metrics["eval/samples"] == 4
    assert metrics["eval/turn_1/reward_mean"] == metrics["eval/turn_1/expected_return"]
    assert not any("win_rate" in name for name in metrics)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"initial", "previous", "comparator"}),
        ({"comparator_policy": "history"}, {"initial", "previous", "comparator"}),
        (
            {"comparator_policy": "model", "comparator_model_name": "builtin:tiny"},
            {"initial", "previous", "comparator"},
        ),
    ],
)
def test_later_teams_are_compared(unbroken: MakeJob, settings: dict[str, Any], names: set[str]) -> None:
    job = unbroken(training=settings)
    metrics = evaluate_iteration.fn(job, 2)
    assert set(opponents_of(job, 2)) == names
    for name in names:
        low, rate, high = (metrics[f"eval/win_rate_{name}{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= rate <= high <= 1


def test_against_itself_a_team_wins_as_often_as_it_loses(
    tmp_path: Path, prepared: MakeJob, run_iteration: Callable[[Job, int], None]
) -> None:
    (tmp_path / "mine.py").write_text("def score(first, second):\n    return [0.5] * len(first)\n")
    job = prepared(reward={"function": "mine.py:score"})
    run_iteration(job, 1)
    assert evaluate_iteration.fn(job, 1)["eval/win_rate_initial"] == 0.5


def test_a_team_is_asked_once(unbroken: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = unbroken()
    metrics = evaluate_iteration.fn(job, 2)
    forget()
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: pytest.fail("asked again"))
    assert evaluate_iteration.fn(job, 2) == metrics


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation": {"samples_per_task": 3}},
        {"training": {"seed": 2}},
        {"training": {"max_new_tokens": 7}},
        {"reward": {"kwargs": {"low": 1.0}}},
        {"code": "newer"},
    ],
)
def test_what_is_measured_otherwise_is_measured_again(
    unbroken: MakeJob, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    evaluate_iteration.fn(unbroken(), 1)
    asked = []
    ask = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: asked.append(1) or ask(*a, **k))
    evaluate_iteration.fn(unbroken(**change), 1)
    assert asked


def test_measuring_changes_no_weight_and_no_random_stream(
    prepared: MakeJob, unbroken_tree: Path, run_iteration: Callable[[Job, int], None]
) -> None:
    job = prepared(evaluation={"samples_per_task": 5, "batch_size": 1})
    for iteration in (0, 0, 1):
        if iteration:
            run_iteration(job, iteration)
        evaluate_iteration.fn(job, iteration)
    run_iteration(job, 2)
    assert job.store.manifest(2).policy == read_json(unbroken_tree / "models/iteration_0002/manifest.json")["policy"]


def test_batches_of_tasks_measure_the_same(unbroken: MakeJob) -> None:
    together = evaluate_iteration.fn(unbroken(), 1)
    assert evaluate_iteration.fn(unbroken(evaluation={"batch_size": 1}), 1) == pytest.approx(together)


def test_greedy_answers(unbroken: MakeJob) -> None:
    job = unbroken(evaluation={"greedy": True, "samples_per_task": 1})
    assert evaluate_iteration.fn(job, 1)["eval/samples"] == 2


def test_without_held_out_tasks_there_is_no_curve(unbroken: MakeJob) -> None:
    job = unbroken()
    job.eval_tasks.write_text("")
    assert evaluate_iteration.fn(job, 1) == {}
    summary = summarize_run.fn(job)
    assert set(summary) == {"training"}
    assert read_curve(job.plots / "evaluation.csv") == []


def test_the_summary_and_the_curves_of_a_run(unbroken: MakeJob) -> None:
    job = unbroken()
    summary = summarize_run.fn(job)
    assert read_json(job.metrics) == summary
    curve = read_curve(job.plots / "evaluation.csv")
    assert [row["iteration"] for row in curve] == [0, 1, 2]
    assert summary["evaluation"]["initial_reward"] == pytest.approx(curve[0]["eval_reward_mean"])
    assert summary["evaluation"]["final_reward"] == pytest.approx(curve[-1]["eval_reward_mean"])
    assert summary["evaluation"]["best_reward"] == max(row["eval_reward_mean"] for row in curve)
    collections = read_curve(job.plots / "collection.csv")
    assert [row["iteration"] for row in collections] == [1, 2]
    assert all(math.isfinite(row["turn_1_reward_mean"]) for row in collections)
    updates = read_curve(job.plots / "training.csv")
    assert len(updates) == summary["training"]["updates"] > 0
    assert updates[-1]["environment_steps"] == summary["training"]["environment_steps"]
    before = {path.name: path.read_bytes() for path in [job.metrics, *job.plots.glob("*.csv")]}
    summarize_run.fn(job)
    assert before == {path.name: path.read_bytes() for path in [job.metrics, *job.plots.glob("*.csv")]}


def test_a_run_that_never_updated_has_a_summary_without_training() -> None:
    row = {"iteration": 0, "eval/reward_mean": 0.5, "eval/reward_se": 0.1}
    summary = run_summary([row, {**row, "iteration": 1, "eval/win_rate_initial": 0.5}], [])
    assert set(summary) == {"evaluation"}
    assert summary["evaluation"]["best_iteration"] == 0
    json.dumps(summary, allow_nan=False)


def test_a_fall_names_the_best_iteration() -> None:
    curve = [{"iteration": i, "eval/reward_mean": r, "eval/reward_se": 0.01} for i, r in enumerate((0.4, 0.85, 0.5))]
    assert "to 0.500 from 0.850 (iteration 1)" in (fall(curve) or "")
    assert fall(curve[:2]) is None


def test_curves_with_gaps_come_back(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"iteration": 0, "a/b": 0.1 + 0.2}, {"iteration": 1, "c": None, "d": 2}]
    write_curve(tmp_path / "curve.csv", rows)
    assert (tmp_path / "curve.csv").read_text().splitlines()[0] == "iteration,a_b,c,d"
    assert read_curve(tmp_path / "curve.csv") == [{"iteration": 0, "a_b": 0.1 + 0.2}, {"iteration": 1, "d": 2}]
    assert read_curve(tmp_path / "missing.csv") == []
