import json
from collections.abc import Callable

import pytest
from prefect import flow, task

from tasks.calling import OPTIONS, call
from tasks.job import Job
from tasks.timing import Timing, read_timings, timed, timings_path

MakeJob = Callable[..., Job]


@task(name="collect", **OPTIONS)
def stage(job: Job, iteration: int, chunk: int = 0) -> int:
    return iteration + chunk


@task(name="summarize", **OPTIONS)
def whole_run(job: Job) -> str:
    return "done"


@flow
def subflow(job: Job, iteration: int) -> int:
    return iteration


def test_a_called_stage_is_noted(make_job: MakeJob) -> None:
    job = make_job()
    assert read_timings(job) == []
    assert call(stage, job, 3, chunk=4) == 7
    assert call(whole_run, job) == "done"
    noted = read_timings(job)
    assert [(t.iteration, t.stage) for t in noted] == [(3, "collect"), (None, "summarize")]
    assert all(t.seconds >= 0 for t in noted)
    assert timings_path(job) == job.work_root / ".comlrl" / "timings.jsonl"


def test_inside_a_flow_run_too(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.calling.FlowRunContext.get", lambda: object())
    monkeypatch.setattr(type(stage), "__call__", lambda self, *args, **kwargs: "a task run")
    job = make_job()
    assert call(stage, job, 1) == "a task run"
    assert [(t.iteration, t.stage) for t in read_timings(job)] == [(1, "collect")]


def test_a_subflow_is_not_noted_beside_its_stages(make_job: MakeJob) -> None:
    job = make_job()
    assert call(subflow, job, 1) == 1
    assert read_timings(job) == []


def test_seconds(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("tasks.timing.time.perf_counter", lambda: next(clock))
    job = make_job()
    with timed(job, "update", 2):
        pass
    assert read_timings(job) == [Timing(2, "update", 2.5)]


def test_a_stage_that_fails_is_not_noted(make_job: MakeJob) -> None:
    job = make_job()
    with pytest.raises(RuntimeError, match="broken"), timed(job, "update", 1):
        raise RuntimeError("broken")
    assert read_timings(job) == []


def test_the_newer_work_on_an_iteration_counts(make_job: MakeJob) -> None:
    """Iteration 1 was made anew with another setting; iteration 2 was not reached again."""
    first, second = make_job(), make_job(training={"seed": 7})
    for job, iteration in ((first, 1), (first, 2), (second, 1), (second, 1)):
        with timed(job, f"seed {job.config.training.seed}", iteration):
            pass
    assert [(t.iteration, t.stage) for t in read_timings(second)] == [(2, "seed 1"), (1, "seed 7"), (1, "seed 7")]


def test_stages_of_the_whole_run_are_made_anew_one_by_one(make_job: MakeJob) -> None:
    """Other training settings need no other preparation."""
    first, second = make_job(), make_job(training={"seed": 7})
    for job, stage_name in ((first, "prepare"), (first, "summarize"), (second, "summarize")):
        with timed(job, stage_name, None):
            pass
    assert [t.stage for t in read_timings(second)] == ["prepare", "summarize"]


def test_more_iterations_are_the_same_work(make_job: MakeJob) -> None:
    for job in (make_job(), make_job(num_iterations=5)):
        with timed(job, "collect", 1):
            pass
    assert len(read_timings(make_job())) == 2


def test_a_torn_line_is_skipped(make_job: MakeJob) -> None:
    job = make_job()
    with timed(job, "pair", 1):
        pass
    good = timings_path(job).read_text()
    half = '{"iteration": 1, "stage": "upd'
    timings_path(job).write_text(good + "\n[1]\n" + json.dumps({"iteration": "x"}) + "\n" + half)
    assert [t.stage for t in read_timings(job)] == ["pair"]


def test_a_note_that_cannot_be_written_stops_nothing(make_job: MakeJob, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job()
    (job.work_root / ".comlrl").write_text("a file where the folder should be")
    assert call(stage, job, 1) == 1
    assert "not noted" in caplog.text
    assert read_timings(job) == []
