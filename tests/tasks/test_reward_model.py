"""A reward model between pairs and policies (MARLHF), as a step of the pipeline."""

from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.run import RunConfig
from comlrl_core.files import read_json
from comlrl_core.trainers.preference import MARLHFIterTrainer
from tasks.collect import collect
from tasks.evaluate import collected_metrics, summarize_run
from tasks.job import Job
from tasks.loading import forget, train_tasks
from tasks.pair import pair
from tasks.prepare import prepare
from tasks.reward_model import fit, newest, reward_model_metrics
from tasks.sample import sample
from tasks.score import score
from tasks.steps import steps_of
from tasks.update import publish, update

TRAINING: dict[str, Any] = {
    "seed": 1,
    "num_threads": 1,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "preference_num_candidates": 3,
    "preference_pairs_per_sample": 2,
    "agent_learning_rate": 2e-3,
    "num_train_epochs": 1,
    "num_generations": 2,
    "rollout_buffer_size": 2,
    "reward_learning_rate": 1e-3,
    "reward_train_batch_size": 2,
}


def job_in(root: Path, reward: dict[str, Any] | None = None, **training: Any) -> Job:
    values = {
        "algorithm": "marlhf_iter",
        "num_iterations": 2,
        "team": {"templates": ["[1] {prompt}\n", "[2] {prompt}\n"]},
        "tasks": {"num_train": 6, "num_eval": 2},
        "reward": reward or {},
        "training": {**TRAINING, **training},
        "evaluation": {"samples_per_task": 2},
        "tracking": {"enabled": False},
    }
    return Job(source_root=root, work_root=root, config=RunConfig.model_validate(values), code="code")


def run(job: Job, iteration: int) -> None:
    collect.fn(job, iteration, 0)
    score.fn(job, iteration, 0)
    pair.fn(job, iteration)
    sample.fn(job, iteration)
    fit.fn(job, iteration)
    update.fn(job, iteration)
    publish.fn(job, iteration)


def files(root: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob(pattern))}


@pytest.mark.parametrize("scoring", ["task", "reward_model"])
def test_pipeline_and_python_trainer_write_the_same_pairs_and_weights(tmp_path: Path, scoring: str) -> None:
    job = job_in(tmp_path / "pipeline", preference_scoring_reward=scoring)
    prepare.fn(job)
    run(job, 1)
    forget()  # the second iteration reads everything from disk
    run(job, 2)
    trainer = MARLHFIterTrainer(
        agent_model="builtin:tiny",
        reward_func="builtin:length_ratio",
        formatters=["[1] {prompt}\n", "[2] {prompt}\n"],
        train_dataset=train_tasks(job),
        args=job.reward_model.model_copy(
            update={"eval_interval": 0, "preference_replay_dir": str(tmp_path / "trainer" / "replay")}
        ),
    )
    trainer.train()
    trainer.save_model(tmp_path / "trainer" / "models" / "iteration_0002")
    assert files(tmp_path / "trainer", "replay/iteration_000?.json") == files(
        tmp_path / "pipeline", "replay/iteration_000?.json"
    )
    weights = "models/iteration_0002/agent_*/*.safetensors"
    assert files(tmp_path / "trainer", weights) == files(tmp_path / "pipeline", weights)


def test_the_reward_model_is_published_beside_the_policies_and_its_measures_reach_the_plots(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    prepare.fn(job)
    for iteration in (1, 2):
        run(job, iteration)
    assert newest(job, 1) is not None and newest(job, 2) is not None
    assert reward_model_metrics(job, 2)["reward_model/train_pairs"] > 0
    summarize_run.fn(job)
    assert "reward_model_train_pairs" in (tmp_path / "plots" / "collection.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("reference", [True, False])
def test_the_distance_from_a_reference_is_measured_per_agent(tmp_path: Path, reference: bool) -> None:
    """0 before the first update; the mean over the collections of an iteration, so above 0 after it."""
    job = job_in(tmp_path, reference_kl_enabled=reference)
    prepare.fn(job)
    run(job, 1)
    measures = reward_model_metrics(job, 1)
    assert [measures.get(f"kl/agent_{agent}", 0.0) > 0 for agent in (1, 2)] == [reference, reference]
    assert ("kl/agent_2" in collected_metrics(job, 1)) == reference


def test_a_fitted_model_is_not_fitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    prepare.fn(job)
    collect.fn(job, 1, 0)
    score.fn(job, 1, 0)
    pair.fn(job, 1)
    sample.fn(job, 1)
    fit.fn(job, 1)
    monkeypatch.setattr("comlrl_core.algorithms.marlhf.fit_or_keep", lambda *_, **__: pytest.fail("fitted again"))
    assert fit.fn(job, 1) == steps_of(job, 1).fit


def test_no_pairs_leave_the_policies_as_they_are_and_end_well(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text("def one(first, second):\n    return [1.0] * len(first)\n")
    job = job_in(tmp_path, reward={"function": "constant.py:one"})
    prepare.fn(job)
    for iteration in (1, 2):
        run(job, iteration)
    assert read_json(tmp_path / "replay" / "iteration_0002.json")["num_pairs"] == 0
    assert job.store.manifest(2).policy == job.store.manifest(0).policy
    assert newest(job, 2) is None
