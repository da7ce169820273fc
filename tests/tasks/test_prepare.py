from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from comlrl_core.environments.tasks import read_tasks
from comlrl_core.errors import DataError
from comlrl_core.files import read_json
from tasks.job import Job
from tasks.loading import initial_team, live, policy
from tasks.prepare import prepare
from tasks.steps import inputs_digest

MakeJob = Callable[..., Job]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_tasks_and_the_initial_team_are_written(make_job: MakeJob) -> None:
    job = make_job()
    assert prepare.fn(job) == {"train": 3, "eval": 2}
    train, held_out = read_tasks(job.train_tasks), read_tasks(job.eval_tasks)
    assert (len(train), len(held_out)) == (3, 2)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    manifest = job.store.manifest(0)
    assert manifest.inputs == inputs_digest(job, 0)
    assert (manifest.iteration, manifest.history, manifest.environment_steps) == (0, (), 0)
    assert manifest.policy == initial_team(job).fingerprint() == policy(job, 0).fingerprint()
    assert read_json(job.store.training_state(0) / "progress.json")["environment_steps"] == 0
    assert live(job, 0).environment_steps == 0


def test_the_same_settings_give_the_same_bytes(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job()
    prepare.fn(job)
    elsewhere = job.model_copy(update={"work_root": tmp_path / "runs" / "a"})
    prepare.fn(elsewhere)
    for name in ("data", "models", "state"):
        assert tree(tmp_path / name) == tree(elsewhere.work_root / name)
    assert str(tmp_path).encode() not in b"".join(tree(elsewhere.work_root).values())


def test_preparing_again_replaces_what_is_there(make_job: MakeJob) -> None:
    prepare.fn(make_job())
    first = make_job().store.manifest(0)
    again = make_job(training={"seed": 2}, tasks={"num_eval": 3})
    assert prepare.fn(again) == {"train": 3, "eval": 3}
    assert again.store.manifest(0).inputs != first.inputs
    assert not list(again.store.models.glob(".*")) and not list(again.store.state.glob(".*"))


def test_tasks_come_from_a_file_of_the_project(tmp_path: Path, make_job: MakeJob) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    job = make_job(tasks={"train": "mine.jsonl[:2]", "eval": None, "num_train": None, "num_eval": None})
    assert prepare.fn(job) == {"train": 2, "eval": 0}
    assert [row["prompt"] for row in read_tasks(job.train_tasks)] == ["one", "two"]
    assert read_tasks(job.eval_tasks) == []


def test_a_task_file_that_is_not_there_leaves_nothing(make_job: MakeJob) -> None:
    job = make_job(tasks={"train": "missing.jsonl"})
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        prepare.fn(job)
    assert not job.train_tasks.exists() and not job.store.models.exists()


def test_the_number_of_threads_is_a_setting(make_job: MakeJob) -> None:
    prepare.fn(make_job(training={"num_threads": 2}))
    assert torch.get_num_threads() == 2


def test_the_initial_team_of_an_interrupted_start_is_kept_and_a_damaged_one_is_made_again(make_job: MakeJob) -> None:
    job = make_job()
    prepare.fn(job)
    manifest = job.store.policy(0) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    prepare.fn(job)
    assert manifest.stat().st_mtime_ns == before
    weights = job.store.policy(0) / "agent_0" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\x00\x00\x00\x40")
    prepare.fn(job)
    assert weights.read_bytes() == whole
