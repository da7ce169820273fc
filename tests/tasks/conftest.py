"""A tiny training job on the built-in model, prepared once, and copied for each test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_core.config.run import RunConfig
from tasks.collect import collect, num_chunks
from tasks.evaluate import evaluate_iteration
from tasks.job import Job
from tasks.loading import forget
from tasks.pair import pair
from tasks.prepare import prepare
from tasks.sample import sample
from tasks.score import score
from tasks.update import publish, update

MakeJob = Callable[..., Job]
SETTINGS: dict[str, Any] = {
    "num_iterations": 2,
    "team": {"templates": ["[1] {prompt}\n", "[2] {prompt}\n"]},
    "tasks": {"num_train": 3, "num_eval": 2},
    "training": {
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
        "rollout_buffer_size": 2,
    },
    "evaluation": {"samples_per_task": 2},
    "tracking": {"enabled": False},
}


def build(root: Path, *, code: str = "code", **changes: Any) -> Job:
    """A job in `root`; `changes` are sections or top-level settings that are laid over `SETTINGS`."""
    values = {
        key: {**value, **changes.get(key, {})}
        if isinstance(value, dict) and not (key == "training" and changes.get("algorithm") == "magrpo")
        else changes.get(key, value)
        for key, value in SETTINGS.items()
    }
    values |= {key: value for key, value in changes.items() if key not in SETTINGS}
    return Job(source_root=root, work_root=root, config=RunConfig.model_validate(values), code=code)


def run(job: Job, iteration: int) -> None:
    """All stages of an iteration, as the flow calls them."""
    for chunk in range(num_chunks(job)):
        collect.fn(job, iteration, chunk)
        score.fn(job, iteration, chunk)
    pair.fn(job, iteration)
    sample.fn(job, iteration)
    update.fn(job, iteration)
    publish.fn(job, iteration)
    evaluate_iteration.fn(job, iteration)


@pytest.fixture(scope="session")
def prepared_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    prepare.fn(build(root))
    return root


@pytest.fixture(scope="session")
def unbroken_tree(tmp_path_factory: pytest.TempPathFactory, prepared_tree: Path) -> Path:
    """Two iterations that nothing interrupted."""
    root = tmp_path_factory.mktemp("unbroken")
    shutil.copytree(prepared_tree, root, dirs_exist_ok=True)
    job = build(root)
    for iteration in (1, 2):
        run(job, iteration)
    forget()
    return root


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Jobs in a folder of this test; nothing is prepared."""
    return lambda **changes: build(tmp_path, **changes)


@pytest.fixture
def build_job() -> MakeJob:
    """Jobs in any folder; nothing is prepared."""
    return build


@pytest.fixture
def prepared(tmp_path: Path, prepared_tree: Path) -> MakeJob:
    """Jobs in a folder of this test that holds the task files and the initial team."""
    shutil.copytree(prepared_tree, tmp_path, dirs_exist_ok=True)
    return lambda **changes: build(tmp_path, **changes)


@pytest.fixture
def unbroken(tmp_path: Path, unbroken_tree: Path) -> MakeJob:
    """Jobs in a folder of this test that holds two finished iterations."""
    shutil.copytree(unbroken_tree, tmp_path, dirs_exist_ok=True)
    return lambda **changes: build(tmp_path, **changes)


@pytest.fixture
def run_iteration() -> Callable[[Job, int], None]:
    return run


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No test sees the team that another one kept, or its number of threads."""
    threads = torch.get_num_threads()
    forget()
    yield
    forget()
    torch.set_num_threads(threads)
