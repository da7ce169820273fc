import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.job import Job
from tasks.steps import clear_aside, clear_before, inputs_digest, steps_of, training_identity

MakeJob = Callable[..., Job]
REWARD = "def score(first, second):\n    return [0.5 for _ in first]\n"
FORMATTER = "def prompt(row):\n    return row['prompt']\n"


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"dpo_beta": 0.2}},
        {"training": {"agent_learning_rate": 1e-3}},
        {"training": {"temperature": 0.9}},
        {"training": {"num_threads": 2}},
        {"training": {"preference_replay_mode": "all_history"}},
        {"training": {"comparator_policy": "history"}},
        {"training": {"reference": "initial"}},
        {"training": {"on_bad_reward": "drop"}},
        {"team": {"templates": "{prompt}"}},
        {"team": {"on_long_prompt": "truncate_left"}},
        {"reward": {"kwargs": {"low": 1.0}}},
        {"code": "newer"},
    ],
)
def test_every_input_renames_the_folder_of_steps(prepared: MakeJob, change: dict[str, Any]) -> None:
    assert steps_of(prepared(**change), 1).folder.name != steps_of(prepared(), 1).folder.name


def test_all_training_settings_but_the_length_are_inputs(prepared: MakeJob) -> None:
    job = prepared()
    fields = set(type(job.config.training).model_fields)
    elsewhere = {"engine", "lora"}  # of the engine, only what changes more than rounding; adapters belong to the team
    assert set(training_identity(job)) == fields - {"num_iterations"} - elsewhere
    rounded = prepared(engine={"precision": "bf16_autocast"})
    assert training_identity(rounded) == training_identity(job) | {"precision": "bf16_autocast"}
    assert rounded.key() != job.key() == prepared(engine={"kind": "deepspeed", "num_processes": 2}).key()


@pytest.mark.parametrize(
    "change",
    [
        {"num_iterations": 9},
        {"evaluation": {"samples_per_task": 9}},
        {"tracking": {"enabled": True}},
    ],
)
def test_what_decides_no_weight_keeps_the_steps(prepared: MakeJob, change: dict[str, Any]) -> None:
    assert steps_of(prepared(**change), 1) == steps_of(prepared(), 1)


def test_a_project_that_was_moved_keeps_its_steps(tmp_path: Path, prepared: MakeJob) -> None:
    job = prepared()
    shutil.copytree(tmp_path, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))
    moved = job.model_copy(update={"work_root": tmp_path / "moved", "source_root": tmp_path / "moved"})
    assert inputs_digest(moved, 0) == inputs_digest(job, 0)
    assert inputs_digest(moved, 1) == inputs_digest(job, 1)


def test_edited_files_rename_the_folder_of_steps(tmp_path: Path, prepared: MakeJob) -> None:
    """The reward code, the tasks, and the iteration before (its manifest stands for all of its past)."""
    (tmp_path / "mine.py").write_text(REWARD)
    job = prepared(reward={"function": "mine.py:score"})
    names = [steps_of(job, 1).folder.name]
    for file, text in (
        (tmp_path / "mine.py", REWARD.replace("0.5", "0.6")),
        (job.train_tasks, job.train_tasks.read_text().replace("train-0000", "train-9999")),
        (job.store.policy(0) / "manifest.json", (job.store.policy(0) / "manifest.json").read_text() + " "),
    ):
        file.write_text(text)
        names.append(steps_of(job, 1).folder.name)
    assert len(set(names)) == len(names)


def test_an_edited_formatter_renames_the_folder_of_steps(tmp_path: Path, prepared: MakeJob) -> None:
    (tmp_path / "mine.py").write_text(FORMATTER)
    job = prepared(team={"templates": None, "formatter": "mine.py:prompt"})
    before = inputs_digest(job, 1)
    (tmp_path / "mine.py").write_text(FORMATTER.replace("row['prompt']", "'> ' + row['prompt']"))
    assert inputs_digest(job, 1) != before


@pytest.mark.parametrize("number", [1, 2])
def test_each_iteration_has_its_own_folder(unbroken: MakeJob, number: int) -> None:
    job = unbroken()
    steps = steps_of(job, number)
    assert steps.folder.name.startswith(f"iteration_{number:04d}-")
    assert steps.inputs == job.store.manifest(number).inputs
    assert steps.folder.parent == job.scratch


def test_the_initial_team_depends_on_what_makes_it_alone(prepared: MakeJob) -> None:
    initial = inputs_digest(prepared(), 0)
    assert inputs_digest(prepared(training={"dpo_beta": 0.2}), 0) == initial
    assert inputs_digest(prepared(training={"seed": 2}), 0) != initial
    assert inputs_digest(prepared(tasks={"num_train": 4}), 0) != initial
    assert inputs_digest(prepared(code="newer"), 0) != initial
    assert initial == prepared().store.manifest(0).inputs


def test_edited_task_files_and_models_make_another_initial_state(tmp_path: Path, make_job: MakeJob) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    job = make_job(tasks={"train": "mine.jsonl[:1]"}, team={"agent_model": "base"})
    digests = [inputs_digest(job, 0)]
    (tmp_path / "mine.jsonl").write_text('{"prompt": "b"}\n')
    digests.append(inputs_digest(job, 0))
    (tmp_path / "base" / "config.json").write_text('{"a": 1}')
    digests.append(inputs_digest(job, 0))
    assert len(set(digests)) == 3


def test_a_kill_in_the_middle_of_a_write_leaves_litter(unbroken: MakeJob) -> None:
    """Files and folders that were being written aside go at the next start; everything whole stays."""
    job = unbroken()
    before = sorted(path for path in job.work_root.rglob("*"))
    (job.store.replay / ".iteration_0002.json.0123456789abcdef.tmp").write_text("{")
    (job.store.models / ".iteration_0002.77.partial" / "agent_0").mkdir(parents=True)
    (job.store.policy(1) / ".manifest.json.0123456789abcdef.tmp").write_text("{")
    (job.scratch / "iteration_0003-00" / ".drawn.jsonl.0123456789abcdef.tmp").parent.mkdir()
    (job.scratch / "iteration_0003-00" / ".drawn.jsonl.0123456789abcdef.tmp").write_text("{")
    clear_aside(job)
    assert [path for path in sorted(job.work_root.rglob("*")) if path.name != "iteration_0003-00"] == before


def test_steps_of_earlier_iterations_are_cleared(prepared: MakeJob) -> None:
    """The newest published one may not be recorded yet; those before it are."""
    job = prepared()
    names = ("iteration_0001-a", "iteration_0001-b", "iteration_0002-a", "iteration_0010-a", "evaluations")
    for name in names:
        (job.scratch / name).mkdir(parents=True)
    clear_before(job, 2)
    assert sorted(path.name for path in job.scratch.iterdir()) == sorted(names[2:])
    clear_before(job, 11)
    clear_before(job, 11)
    assert [path.name for path in job.scratch.iterdir()] == ["evaluations"]
