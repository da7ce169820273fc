"""A training job: everything a stage needs to know, as plain values that can cross a process border."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from comlrl_core.algorithms.actor_critic_config import MAACConfig
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.algorithms.reinforce_config import MAGRPOConfig
from comlrl_core.config.run import RunConfig
from comlrl_core.digests import digest_values
from comlrl_core.store import Store

# A run keeps its key when these change. Engines and numbers of processes agree up to rounding, so that a run can go on
# with another one.
NOT_IDENTITY = ("num_iterations", "tracking", "engine")
RUN_KEY_DIGITS = 12
BUILTIN_TRANSITIONS = {"builtin:length_ratio": "comlrl_core.environments.length_ratio:transition"}


class Job(BaseModel):
    """One training job.

    Attributes:
        source_root: the project folder; relative paths in the settings (reward files, models, data) start
        here. work_root: where data, replay, models and state go: the project folder, or `runs/<key>` of it.
        config: all settings. code: digest of the installed package.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source_root: Path
    work_root: Path
    config: RunConfig
    code: str

    @property
    def store(self) -> Store:
        return Store.below(self.work_root)

    @property
    def train_tasks(self) -> Path:
        return self.work_root / "data" / "tasks" / "train.jsonl"

    @property
    def eval_tasks(self) -> Path:
        return self.work_root / "data" / "tasks" / "eval.jsonl"

    @property
    def metrics(self) -> Path:
        return self.work_root / "metrics.json"

    @property
    def plots(self) -> Path:
        return self.work_root / "plots"

    @property
    def scratch(self) -> Path:
        """Finished steps of iterations and evaluations that are not published yet."""
        return self.work_root / ".comlrl" / "work"

    @property
    def evaluations(self) -> Path:
        """Evaluated samples, one file per policy, side and evaluation settings."""
        return self.scratch / "evaluations"

    @property
    def preference(self) -> MADPOConfig:
        """The training settings of an algorithm that learns from preferences."""
        training = self.config.training
        assert isinstance(training, MADPOConfig), f"{self.config.algorithm} has no preference settings"
        return training

    @property
    def reward_model(self) -> MARLHFConfig | MARLHFIterConfig:
        """The training settings of an algorithm that fits a reward model."""
        training = self.config.training
        assert isinstance(training, MARLHFConfig | MARLHFIterConfig), f"{self.config.algorithm} fits no reward model"
        return training

    @property
    def rollouts(self) -> MAGRPOConfig | MAACConfig:
        """The training settings of an algorithm that learns from rollouts."""
        training = self.config.training
        assert isinstance(training, MAGRPOConfig | MAACConfig), f"{self.config.algorithm} has no rollout settings"
        return training

    def key(self) -> str:
        """Twelve hex digits that name the run: all settings but lengths, tracking and engine."""
        return run_key(self.config)


def run_key(config: RunConfig) -> str:
    """The identity of a run's settings: of what it learns and how that is measured."""
    return _key(config, NOT_IDENTITY)


def training_key(config: RunConfig) -> str:
    """The identity of the settings that weights and iteration files depend on."""
    return _key(config, (*NOT_IDENTITY, "evaluation"))


def _key(config: RunConfig, ignored: tuple[str, ...]) -> str:
    values: dict[str, Any] = config.values()
    for name in ignored:
        values.pop(name, None)
    values |= config.engine.identity()
    return digest_values("run", values)[:RUN_KEY_DIGITS]
