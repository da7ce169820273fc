"""One pass over the tasks with an algorithm that learns from rewards, as a step of the pipeline."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.environments.length_ratio import transition as length_transition
from comlrl_core.errors import DataError
from comlrl_core.trainers.reinforce import MAGRPOTrainer
from tasks import rollout as rollout_module
from tasks.evaluate import evaluation_metrics, over_turns, policy_turns
from tasks.job import Job
from tasks.loading import forget, train_tasks
from tasks.prepare import prepare
from tasks.rollout import rollout, rollout_metrics
from tasks.steps import inputs_digest
from tasks.update import publish, update_metrics

TRAINING: dict[str, Any] = {
    "seed": 1,
    "num_threads": 1,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "num_generations": 2,
    "num_turns": 1,
    "early_termination_threshold": None,
    "rollout_buffer_size": 2,
    "agent_learning_rate": 2e-3,
}


def job_in(root: Path, iterations: int = 2, transition: str | None = None, **training: Any) -> Job:
    from comlrl_core.config.run import RunConfig

    values = {
        "algorithm": "magrpo",
        "num_iterations": iterations,
        "team": {"templates": ["[1] {prompt}\n", "[2] {prompt}\n"]},
        "tasks": {"num_train": 3, "num_eval": 2, "transition": transition},
        "training": {**TRAINING, **training},
        "evaluation": {"samples_per_task": 2},
        "tracking": {"enabled": False},
    }
    return Job(source_root=root, work_root=root, config=RunConfig.model_validate(values), code="code")


def run(job: Job, iteration: int) -> None:
    rollout.fn(job, iteration)
    publish.fn(job, iteration)


def weights(root: Path, iteration: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted(root.glob(f"models/iteration_{iteration:04d}/*/*.safetensors"))]


def test_passes_write_the_weights_of_the_python_trainer_also_after_a_restart(tmp_path: Path) -> None:
    job = job_in(tmp_path / "pipeline")
    prepare.fn(job)
    run(job, 1)
    forget()  # the second pass reads everything from disk
    run(job, 2)
    trainer = MAGRPOTrainer(
        agent_model="builtin:tiny",
        reward_func="builtin:length_ratio",
        formatters=["[1] {prompt}\n", "[2] {prompt}\n"],
        train_dataset=train_tasks(job),
        args=job.rollouts.model_copy(update={"eval_interval": 0}),
    )
    trainer.train()
    trainer.save_model(tmp_path / "trainer" / "models" / "iteration_0002")
    assert weights(tmp_path / "trainer", 2) == weights(tmp_path / "pipeline", 2)


def test_a_finished_pass_is_not_repeated_and_its_metrics_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    prepare.fn(job)
    run(job, 1)
    before = weights(tmp_path, 1)
    monkeypatch.setattr(rollout_module, "reinforce_epoch", lambda *_, **__: pytest.fail("the pass was repeated"))
    run(job, 1)
    assert weights(tmp_path, 1) == before
    steps = [row["environment_steps"] for row in update_metrics(job, 1)]
    assert steps == sorted(steps) and steps[-1] == 3 * 2, "three tasks with two joint responses each"
    assert [row["environment_steps"] for row in rollout_metrics(job, 1)][-1] == 6
    assert job.store.manifest(1).environment_steps == 6
    assert job.store.manifest(1).history == (), "no iteration file comes of it"


def test_more_passes_leave_the_earlier_ones_valid_unless_the_schedule_spans_them_all(tmp_path: Path) -> None:
    job = job_in(tmp_path, iterations=2)
    prepare.fn(job)
    assert inputs_digest(job, 1) == inputs_digest(job_in(tmp_path, iterations=5), 1)
    linear = inputs_digest(job_in(tmp_path, iterations=2, lr_schedule="linear"), 1)
    assert linear != inputs_digest(job_in(tmp_path, iterations=5, lr_schedule="linear"), 1)


def test_a_reference_that_is_missing_is_named_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, reference_kl_enabled=True)
    prepare.fn(job)
    run(job, 1)
    shutil.rmtree(job.store.policy(0))
    monkeypatch.setattr("comlrl_core.rollout.tree._answer", lambda *_: pytest.fail("something was sampled"))
    with pytest.raises(DataError, match="iteration_0000"):
        rollout.fn(job, 2)


def test_two_turns_are_evaluated_turn_by_turn_and_their_mean_is_the_reward(tmp_path: Path) -> None:
    job = job_in(tmp_path, iterations=1, num_turns=2, transition="builtin:length_ratio")
    prepare.fn(job)
    run(job, 1)
    turns = policy_turns(job, 1, "team")
    assert [len(samples) for samples in turns] == [4, 4], "two tasks, two samples"
    metrics = evaluation_metrics(job, 1)
    first, second = metrics["eval/turn_1/reward_mean"], metrics["eval/turn_2/reward_mean"]
    assert metrics["eval/reward_mean"] == pytest.approx((first + second) / 2)
    assert metrics["eval/turn_1/expected_return"] == pytest.approx(first + second)
    assert len(over_turns(turns)) == 4
    assert length_transition("p", ["ab", "c"], 2) == ["(you 2, other 1) p", "(you 1, other 2) p"]


def test_a_project_function_serves_as_transition(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def again(prompt, agent_completions, num_agents, prompt_history_per_agent=None,"
        " response_history_per_agent=None):\n    return ['again: ' + prompt] * num_agents\n"
    )
    job = job_in(tmp_path, iterations=1, num_turns=2, transition="mine.py:again")
    prepare.fn(job)
    before = inputs_digest(job, 1)
    run(job, 1)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("again: ", "once more: "))
    assert inputs_digest(job, 1) != before, "another transition is another run"
