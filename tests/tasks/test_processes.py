"""Iterations on two processes give what one process gives: the same answers and pairs, the same weights to 1e-5."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comlrl_core.config.run import RunConfig
from comlrl_core.files import read_jsonl
from tasks.job import Job
from tasks.loading import forget
from tasks.pair import pair
from tasks.prepare import prepare
from tasks.reward_model import fit
from tasks.rollout import rollout
from tasks.sample import sample
from tasks.score import score
from tasks.steps import steps_of
from tasks.update import publish, update

pytestmark = pytest.mark.slow

Build = Callable[..., Job]
TWO = {"kind": "deepspeed", "num_processes": 2, "collective_timeout": 120.0, "stage_timeout": 300.0}
# The first steps of AdamW have the size of the learning rate even where a gradient is nothing but rounding; with an
# epsilon above that, what agrees stays together.
RATE = {"agent_learning_rate": 1e-3, "adam_epsilon": 1e-6}
SAMPLING = {"seed": 1, "num_threads": 1, "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": None}
REWARDS = {"num_generations": 3, "num_turns": 1, "train_batch_size": 2, "micro_batch_size": 4}
FITTED = {
    "reward_num_train_epochs": 1,
    "reward_train_batch_size": 2,
    "reward_learning_rate": 1e-3,
    "num_generations": 2,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.relative_to(folder)}/{name}": value for name, value in load_file(file).items()}
    assert found and all(value.numel() for value in found.values())
    return found


def assert_close(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def learn(job: Job, iteration: int) -> None:
    """The stages of an iteration that trains, as the flow calls them."""
    from tasks.collect import collect

    if job.config.learns_from_rewards():
        rollout.fn(job, iteration)
    else:
        collect.fn(job, iteration, 0)
        score.fn(job, iteration, 0)
        pair.fn(job, iteration)
        sample.fn(job, iteration)
        if job.config.fits_reward_model():
            fit.fn(job, iteration)
        update.fn(job, iteration)
    publish.fn(job, iteration)


@pytest.fixture
def places(tmp_path: Path, build_job: Build) -> Callable[..., tuple[Job, Job]]:
    """The same job in two folders: with one process and plain PyTorch, and with other engine settings."""

    def make(engine: dict[str, Any], **changes: Any) -> tuple[Job, Job]:
        local = build_job(tmp_path / "local", **changes)
        values = {**local.config.values(), "engine": engine}
        config = RunConfig.model_validate(values)
        other = local.model_copy(update={"source_root": tmp_path / "other", "work_root": tmp_path / "other"})
        other = other.model_copy(update={"config": config})
        prepare.fn(local)
        forget()
        shutil.copytree(local.work_root, other.work_root)
        return local, other

    return make


def check(local: Job, other: Job, iteration: int) -> None:
    if not local.config.learns_from_rewards():
        names = ("pairs/pairs.jsonl", "drawn.jsonl", "candidates_0000.jsonl", "scored_0000.jsonl")
        ours, theirs = steps_of(local, iteration), steps_of(other, iteration)
        compared = [name for name in names if (ours.folder / name).is_file()]
        assert "candidates_0000.jsonl" in compared and "drawn.jsonl" in compared
        for name in compared:
            assert read_jsonl(ours.folder / name) == read_jsonl(theirs.folder / name)
    assert_close(local.store.policy(iteration), other.store.policy(iteration))
    assert_close(local.store.training_state(iteration), other.store.training_state(iteration))


def test_preferences(places: Callable[..., tuple[Job, Job]]) -> None:
    """Three tasks on two processes, ZeRO 3 with all weights sharded; a second iteration goes on without DeepSpeed."""
    options = {"stage3_param_persistence_threshold": 0}
    local, other = places({**TWO, "zero_stage": 3, "zero_options": options}, training={"reference": "initial", **RATE})
    for job in (local, other):
        learn(job, 1)
        forget()
    check(local, other, 1)
    alone = other.model_copy(update={"config": local.config})
    assert alone.key() == other.key()
    for job in (local, alone):
        learn(job, 2)
        forget()
    assert_close(local.store.policy(2), alone.store.policy(2))


@pytest.mark.endurance
def test_rewards(places: Callable[..., tuple[Job, Job]]) -> None:
    """Two passes with a reference; the second of the local run goes on on two processes."""
    training = {**SAMPLING, **REWARDS, **RATE, "reference_kl_enabled": True}
    local, other = places({**TWO, "zero_stage": 2}, algorithm="magrpo", training=training)
    learn(local, 1)
    forget()
    shutil.rmtree(other.work_root)
    shutil.copytree(local.work_root, other.work_root)
    learn(local, 2)
    learn(other, 2)
    check(local, other, 2)


@pytest.mark.endurance
def test_a_reward_model_and_adapters(places: Callable[..., tuple[Job, Job]]) -> None:
    """Collection, reward model and policies on two processes; the policies are adapters on one base."""
    team = {"lora": {"r": 2, "targets": ["q_proj", "down_proj"]}, "templates": ["[1] {prompt}\n", "[2] {prompt}\n"]}
    local, other = places({**TWO, "zero_stage": 1}, algorithm="marlhf_iter", training={**FITTED, **RATE}, team=team)
    for job in (local, other):
        learn(job, 1)
        forget()
    check(local, other, 1)
