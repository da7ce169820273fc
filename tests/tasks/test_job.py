from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.job import RUN_KEY_DIGITS, Job

MakeJob = Callable[..., Job]


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"dpo_beta": 0.2}},
        {"training": {"seed": 2}},
        {"team": {"templates": "{prompt}"}},
        {"tasks": {"num_train": 4}},
        {"reward": {"kwargs": {"low": 1.0}}},
        {"algorithm": "madpo", "num_iterations": 1},
        {"evaluation": {"samples_per_task": 9}},
    ],
)
def test_another_setting_is_another_run(make_job: MakeJob, change: dict[str, Any]) -> None:
    key = make_job().key()
    assert len(key) == RUN_KEY_DIGITS and int(key, 16) >= 0
    assert make_job(**change).key() != key


@pytest.mark.parametrize(
    "change",
    [
        {"num_iterations": 5},
        {"tracking": {"experiment": "other"}},
        {"code": "newer"},
    ],
)
def test_a_longer_run_is_the_same_run(make_job: MakeJob, change: dict[str, Any]) -> None:
    assert make_job(**change).key() == make_job().key()


def test_a_job_crosses_a_process_border_as_text(make_job: MakeJob) -> None:
    job = make_job(training={"agent_learning_rate": 0.1 + 0.2})
    again = Job.model_validate_json(job.model_dump_json())
    assert again == job
    assert again.key() == job.key()
    assert type(again.config.training) is type(job.config.training)


def test_a_job_does_not_change(make_job: MakeJob) -> None:
    job = make_job()
    with pytest.raises(ValidationError):
        job.code = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Job.model_validate({**job.model_dump(), "unknown": 1})


def test_everything_lies_below_the_work_root(tmp_path: Path, make_job: MakeJob) -> None:
    work = tmp_path / "runs" / "abc"
    job = make_job().model_copy(update={"work_root": work})
    store = job.store
    places = [job.train_tasks, job.eval_tasks, job.metrics, job.plots, job.scratch, job.evaluations]
    places += [store.replay, store.models, store.state]
    assert all(place.is_relative_to(work) for place in places)
    # Scratch files are no output: DVC deletes outputs before a stage runs.
    assert not any(job.scratch.is_relative_to(place) for place in (store.replay, store.models, store.state))
