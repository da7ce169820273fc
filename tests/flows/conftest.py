"""A project without DVC, with settings as small as they can be, for tests in this process."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import flows
from comlrl_core.config.files import apply_overrides, read_yaml, resolve
from comlrl_core.config.run import RunConfig
from flows.project import Project
from flows.setup import TEMPLATES
from tasks.loading import forget

SMALL = {
    "num_train": "3",
    "num_eval": "2",
    "max_new_tokens": "8",
    "preference_num_candidates": "3",
    "preference_pairs_per_sample": "2",
    "min_reward_gap": "0.0",
    "rollout_buffer_size": "2",
    "train_batch_size": "2",
    "samples_per_task": "2",
    "enabled": "false",
}
OURS = ("COMLRL", "DVC", "MLFLOW", "PREFECT")


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Nothing that a developer's shell says about other projects; and what a test sets goes with it."""
    before, threads = dict(os.environ), torch.get_num_threads()
    loggers = [logging.getLogger(name) for name in ("comlrl_core", "flows", "tasks")]
    logging_before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ["COMLRL_PROGRESS"] = "0"
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)
    for logger, (level, handlers, propagate) in zip(loggers, logging_before, strict=True):
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate
    forget()


@pytest.fixture
def small_project(tmp_path: Path, own_environment: None) -> Project:
    """The files that `comlrl init` gives a project, small settings for two iterations, no DVC repository."""
    root = tmp_path / "project"
    root.mkdir()
    templates = Path(flows.__file__).parent / "templates"
    for template, name in TEMPLATES.items():
        if not name.startswith("."):
            shutil.copy(templates / template, root / name)
    params = root / "params.yaml"
    text = params.read_text()
    for name, value in SMALL.items():
        text, count = re.subn(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
        assert count == 1, name
    params.write_text(text)
    from flows.pipeline import set_iterations

    set_iterations(params, 2)
    return Project.at(root)


@pytest.fixture
def settings_of(small_project: Project) -> Callable[..., RunConfig]:
    """The project's settings with `section.key=value` overrides."""

    def settings(*overrides: str) -> RunConfig:
        values = read_yaml(small_project.params)
        return resolve(apply_overrides(values, overrides), small_project.params)

    return settings
