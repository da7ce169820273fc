"""What all trainers share: team, oracle, tasks, evaluation, checkpoints."""

import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from comlrl_core.algorithms.critic_setup import critic_optimizer
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.shared import Learned, load_training_state, make_engines
from comlrl_core.config.devices import check_devices
from comlrl_core.config.fields import RolloutTrainingFields
from comlrl_core.critics.building import renew_engines
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.files import save_critics
from comlrl_core.critics.layout import FOLDER as CRITIC_FOLDER
from comlrl_core.digests import digest_values
from comlrl_core.engine import processes
from comlrl_core.environments.tasks import load_tasks
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.evaluation import EvaluatedSample, summarize
from comlrl_core.evaluation.collapse import Measured, collapse_warning
from comlrl_core.notices import say_once
from comlrl_core.rewards.loading import identify_reward
from comlrl_core.store import MANIFEST, Manifest, initial_manifest
from comlrl_core.team.checkpoint import load_team_folder, save_team
from comlrl_core.team.formatters import FormatterSpec
from comlrl_core.team.team import Team, load_team
from comlrl_core.trainers.arguments import (
    RewardProcessor,
    Source,
    check_evaluation,
    config_of,
    count_agents,
    make_oracle,
    say_untracked,
    set_agents,
)
from comlrl_core.trainers.checkpoints import STATE, differences, save_checkpoint

logger = logging.getLogger(__name__)

MetricsCallback = Callable[[dict[str, float], int], None]
# Settings that change no weight: where files go, how often something is reported.
NOT_IDENTITY = {
    "logging_steps", "eval_interval", "eval_num_samples", "eval_batch_size", "num_iterations",
    "preference_replay_dir", "policy_checkpoint_dir", "log_reward_distribution", "engine",
}  # fmt: skip


class TeamTrainer:
    """Base of all trainers: the published arguments, evaluation, saving, and what a checkpoint must agree with."""

    config_class: type[MADPOConfig] | type[RolloutTrainingFields]
    args: Any

    def __init__(
        self,
        *,
        agent_model: Source | None = None,
        agents: Sequence[Source] | None = None,
        num_agents: int | None = None,
        tokenizer: str | PreTrainedTokenizerBase | Sequence[str | PreTrainedTokenizerBase] | None = None,
        reward_func: Any = None,
        reward_processor: RewardProcessor | None = None,
        formatters: FormatterSpec | Sequence[FormatterSpec] = None,
        args: Any = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        model_config: Mapping[str, Any] | None = None,
        external_transition: Callable[..., Any] | None = None,
        eval_logger: Callable[..., Any] | None = None,
        eval_aggregator: Callable[..., Any] | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        metrics_callback: MetricsCallback | None = None,
        on_long_prompt: str = "fail",
    ) -> None:
        self.args = config_of(args, self.config_class)
        check_devices(self.args)
        if self.args.engine.kind == "deepspeed":
            processes.join(self.args.engine.collective_timeout)
        count = count_agents(self.args, agent_model, agents, num_agents)
        set_agents(self.args, count)
        check_evaluation(eval_logger, eval_aggregator)
        say_untracked(wandb_config)
        self.check_transition(external_transition)
        self.args.say_notices()
        self.oracle = make_oracle(reward_func, count, reward_processor, self.args.on_bad_reward)
        self.check_oracle()
        self.train_tasks = None if train_dataset is None else load_tasks(train_dataset)
        self.eval_tasks = [] if eval_dataset is None else load_tasks(eval_dataset)
        self.eval_logger, self.eval_aggregator = eval_logger, eval_aggregator
        self.metrics_callback = metrics_callback
        self.formatters = formatters
        self.model_config = dict(model_config or {})
        if self.args.num_threads is not None:
            torch.set_num_threads(self.args.num_threads)
        self.team = load_team(
            agent_model=agent_model,
            agents=agents,
            num_agents=count,
            tokenizer=tokenizer,
            formatters=formatters,
            model_config=self.model_config,
            seed=self.args.seed,
            devices=self.args.agent_devices,
            on_long_prompt=on_long_prompt,
            lora=self.args.lora,
        )
        self.engines = make_engines(self.team, self.args)
        self.critics = self.make_critics(None)
        self.environment_steps = 0
        self._evaluated: list[Measured] = []
        rendered = [self.team.prompts(task) for task in self.train_tasks or ()]
        self._data_identity = {
            "reward_func": self.oracle.label,
            "reward_processor": None if reward_processor is None else "@".join(identify_reward(reward_processor)),
            "train_dataset": digest_values(self.train_tasks),
            "formatters": digest_values(rendered),
            **self.further_identity(),
        }
        self.manifest: Manifest = initial_manifest(digest_values(self.identity()))

    # published surface -------------------------------------------------------------------------------------------

    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Answer `num_eval_samples` evaluation tasks (default: `args.eval_num_samples`) once each and score them.

        Returns per turn `eval/turn_k/reward_mean`, `eval/turn_k/expected_return`, standard error, lengths and the
        aggregate of `eval_logger`; `{}` without an `eval_dataset`. No training stream moves.
        """
        if not self.eval_tasks:
            return {}
        if num_eval_samples is not None and num_eval_samples < 1:
            raise ConfigError(f"num_eval_samples must be at least 1 or None, not {num_eval_samples}")
        tasks = self.eval_tasks[: num_eval_samples or self.args.eval_num_samples]
        turns = self.evaluated_turns(tasks)
        metrics: dict[str, float] = {}
        following = 0.0
        for turn in range(len(turns), 0, -1):
            if turns[turn - 1]:
                summary = summarize(turns[turn - 1])
                following = summary["reward_mean"] + self.turn_discount() * following
                summary["expected_return"] = following
                metrics = {**{f"eval/turn_{turn}/{name}": value for name, value in summary.items()}, **metrics}
        if self.eval_logger is not None and self.eval_aggregator is not None:
            answered: dict[str, list[EvaluatedSample]] = {}
            for turn_samples in turns:
                for sample in turn_samples:
                    answered.setdefault(sample.task_id, []).append(sample)
            chains = [answered[str(task["task_id"])] for task in tasks]  # shorter where a rollout ended
            metrics |= processes.by_first(lambda: self._users_metrics(tasks, chains, len(turns)))
        return metrics

    def _users_metrics(
        self, tasks: Sequence[Mapping[str, Any]], chains: Sequence[Sequence[EvaluatedSample]], num_turns: int
    ) -> dict[str, float]:
        """What `eval_logger` and `eval_aggregator` make of the answers."""
        assert self.eval_logger is not None and self.eval_aggregator is not None
        details = self.eval_logger(
            agent_completions_turns=[
                [[sample.texts[agent] for sample in chain] for chain in chains] for agent in range(self.team.num_agents)
            ],
            batch_items=[dict(task) for task in tasks],
            prompts=[self.team.prompts(task)[0] for task in tasks],
        )
        aggregate = self.eval_aggregator(details, num_turns=num_turns)
        return {f"eval/{name}": float(value) for name, value in aggregate.items()}

    def save_model(self, output_dir: str | Path) -> None:
        """Write one plain Hugging Face folder per agent (`agent_0`, ...) below `output_dir`, and `critic`, if any."""
        save_team(self.team, Path(output_dir))
        if self.critics is not None:
            save_critics(self.critics, Path(output_dir) / CRITIC_FOLDER)

    # what a trainer of one kind says ------------------------------------------------------------------------------

    def check_transition(self, external_transition: Callable[..., Any] | None) -> None:
        """Look at the transition before anything is loaded."""

    def check_oracle(self) -> None:
        """Look at the oracle before anything is loaded."""

    def make_critics(self, folder: Path | None) -> Critics | None:
        """New critics for this team and its engines, or those that lie in `folder`; None for algorithms without."""
        return None

    def further_identity(self) -> dict[str, Any]:
        """What else decides the weights, beside settings, tasks and reward."""
        return {}

    def evaluated_turns(self, tasks: Sequence[Mapping[str, Any]]) -> list[list[EvaluatedSample]]:
        """One answer to each task, turn by turn."""
        raise NotImplementedError

    def turn_discount(self) -> float:
        """Weight of the next turn in a turn's expected return."""
        return 1.0

    # shared by the trainers --------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Everything that decides the weights, by name, without the length of the run.

        Under a schedule that falls to zero at the end of the run, its length decides the weights too.
        """
        ignored = set(NOT_IDENTITY)
        if not self.args.is_iterative() and self.args.lr_schedule.startswith("constant"):
            ignored.add("num_train_epochs")
        settings = self.args.model_dump(mode="json", exclude=ignored)
        return {"trainer": type(self).__name__, **settings, **self._data_identity}

    def required_tasks(self) -> list[dict[str, Any]]:
        """The training tasks; a `ConfigError` where the trainer was made without."""
        if self.train_tasks is None:
            raise ConfigError("train_dataset is required by train(): a list of rows, a data set, a file or a name")
        return self.train_tasks

    def report(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to `metrics_callback`; `step` counts environment steps. A fall of the reward is said.

        Of several processes the first reports.
        """
        if not processes.is_first():
            return
        if "eval/turn_1/expected_return" in metrics:
            self._say_fall(metrics, step)
        if metrics and self.metrics_callback is not None:
            self.metrics_callback(metrics, step)

    def _say_fall(self, metrics: dict[str, float], step: int) -> None:
        """Warn where an evaluation is well below the best so far; once, however long the team stays there."""
        errors = [value for name, value in metrics.items() if re.fullmatch(r"eval/turn_\d+/reward_se", name)]
        measured = Measured(f"environment step {step}", metrics["eval/turn_1/expected_return"], math.hypot(*errors))
        if not math.isfinite(measured.reward):
            return
        fallen_before = collapse_warning(self._evaluated) is not None
        self._evaluated.append(measured)
        warning = collapse_warning(self._evaluated)
        if warning is not None and not fallen_before:
            logger.warning("environment step %d: %s", step, warning)

    def checked_manifest(self, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint that was made with this trainer's settings, tasks and reward function."""
        manifest = Manifest.read(checkpoint / MANIFEST)
        identity = self.identity()
        if manifest.inputs != digest_values(identity):
            found = "; ".join(differences(checkpoint, identity)) or "this version reads settings differently"
            raise ConfigError(
                f"{checkpoint}: was made by another run ({found}); only the length of the run may change on resuming"
            )
        return manifest

    def restore(self, checkpoint: Path, manifest: Manifest) -> None:
        """Go on from a checkpoint: its weights, optimizer state and counters."""
        self.team = self.read_team(checkpoint, self.args.agent_devices)
        self.engines = make_engines(self.team, self.args)
        self.critics = self.make_critics(checkpoint / CRITIC_FOLDER)
        critic_engines = () if self.critics is None else self.critics.engines
        self.environment_steps = load_training_state(checkpoint / STATE, self.engines, self.args, critic_engines)
        self.manifest = manifest

    def reset_engines(self) -> None:
        """Forget all optimizer moments."""
        self.engines = make_engines(self.team, self.args)
        if self.critics is not None:
            renew_engines(self.critics, self.engines, critic_optimizer(self.args), self.args.engine)

    def save_checkpoint(self, folder: Path, learned: Learned) -> None:
        """Write a checkpoint of this moment."""
        save_checkpoint(
            folder,
            self.team,
            self.engines,
            self.args,
            self.manifest,
            learned,
            self.identity(),
            self.save_beside,
            self.critics,
        )

    def save_beside(self, folder: Path) -> None:
        """Write what a checkpoint holds beside policies, critics and training state."""

    def read_team(self, folder: Path, devices: Any) -> Team:
        """A team from a folder of policies, with this trainer's formatters."""
        options = {k: v for k, v in self.model_config.items() if k != "special_tokens"}  # saved with the models
        long = self.team.on_long_prompt
        return load_team_folder(folder, self.formatters, devices, long, options, self.team.adapters)

    def folder_or_temporary(self, folder: str | Path | None, what: str) -> Path:
        """`folder`, or a temporary one whose place is said."""
        if folder is not None:
            return Path(folder)
        made = Path(processes.by_first(lambda: tempfile.mkdtemp(prefix=f"comlrl-{what}-")))
        say_once(f"temporary-{made}", f"no folder was named for {what}: it goes to {made}")
        return made

    def load_past(self, folder: Path, devices: Any) -> Team:
        """A frozen team from a folder of policies, with this trainer's formatters."""
        if not folder.is_dir():
            raise DataError(f"{folder}: the policies that this run compares with are not there")
        return frozen(self.read_team(folder, devices))


def frozen(team: Team) -> Team:
    """The same team, without gradients."""
    for model in team.unique_models:
        model.requires_grad_(False)
    return team
