"""What the preference trainers share: team, oracle, tasks, evaluation, saving."""

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from comlrl_core.algorithms.madpo import Metrics
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.preference_learning import load_training_state, make_engines, sampling
from comlrl_core.comparators.base import Comparator
from comlrl_core.digests import digest_values
from comlrl_core.environments.tasks import load_tasks
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.evaluation import evaluate, summarize
from comlrl_core.notices import say_once
from comlrl_core.preference.candidates import TaskCandidates
from comlrl_core.preference.collection import collect
from comlrl_core.preference.scoring import score_candidates
from comlrl_core.rewards.loading import identify_reward
from comlrl_core.store import MANIFEST, Manifest, initial_manifest
from comlrl_core.team.checkpoint import load_team_folder, save_team
from comlrl_core.team.formatters import FormatterSpec
from comlrl_core.team.team import Team, load_team
from comlrl_core.trainers.arguments import (
    RewardProcessor,
    Source,
    check_evaluation,
    check_reward_range,
    config_of,
    count_agents,
    make_oracle,
    say_unused,
    set_agents,
)
from comlrl_core.trainers.checkpoints import STATE, differences

logger = logging.getLogger(__name__)

MetricsCallback = Callable[[dict[str, float], int], None]
# Settings that change no weight: where files go, how often something is reported.
NOT_IDENTITY = {
    "logging_steps", "eval_interval", "eval_num_samples", "eval_batch_size", "num_iterations",
    "preference_replay_dir", "policy_checkpoint_dir", "log_reward_distribution",
}  # fmt: skip


class PreferenceTrainer:
    """Base of the preference trainers; see `MADPOTrainer` and `MADPOIterTrainer`."""

    config_class: type[MADPOConfig] = MADPOConfig
    args: MADPOConfig

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
        args: MADPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        model_config: Mapping[str, Any] | None = None,
        external_transition: Callable[..., Any] | None = None,
        eval_logger: Callable[..., Any] | None = None,
        eval_aggregator: Callable[..., Any] | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        metrics_callback: MetricsCallback | None = None,
        centralized_comparator_adapter: Any = None,
        on_long_prompt: str = "fail",
    ) -> None:
        self.args = config_of(args, self.config_class)
        count = count_agents(self.args, agent_model, agents, num_agents)
        set_agents(self.args, count)
        check_evaluation(eval_logger, eval_aggregator)
        say_unused(wandb_config, external_transition, centralized_comparator_adapter)
        self.args.say_notices()
        self.oracle = make_oracle(reward_func, count, reward_processor, self.args.on_bad_reward)
        check_reward_range(self.args, self.oracle)
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
        )
        self.engines = make_engines(self.team, self.args)
        self.environment_steps = 0
        rendered = [self.team.prompts(task) for task in self.train_tasks or ()]
        self._data_identity = {
            "reward_func": self.oracle.label,
            "reward_processor": None if reward_processor is None else "@".join(identify_reward(reward_processor)),
            "train_dataset": digest_values(self.train_tasks),
            "formatters": digest_values(rendered),
        }
        self.manifest: Manifest = initial_manifest(digest_values(self.identity()))

    # published surface -------------------------------------------------------------------------------------------

    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Answer `num_eval_samples` evaluation tasks (default: `args.eval_num_samples`) once each and score them.

        Returns `eval/turn_1/reward_mean`, `eval/turn_1/expected_return`, standard error, lengths and the aggregate of
        `eval_logger`; `{}` without an `eval_dataset`. No training stream moves.
        """
        if not self.eval_tasks:
            return {}
        if num_eval_samples is not None and num_eval_samples < 1:
            raise ConfigError(f"num_eval_samples must be at least 1 or None, not {num_eval_samples}")
        tasks = self.eval_tasks[: num_eval_samples or self.args.eval_num_samples]
        samples = evaluate(
            self.team,
            self.oracle,
            tasks,
            samples_per_task=1,
            sampling=sampling(self.args),
            seed=self.args.seed,
            batch_size=self.args.eval_batch_size,
            tokens_per_batch=self.args.tokens_per_batch,
        )
        metrics = {f"eval/turn_1/{name}": value for name, value in summarize(samples).items()}
        metrics["eval/turn_1/expected_return"] = metrics["eval/turn_1/reward_mean"]
        if self.eval_logger is not None and self.eval_aggregator is not None:
            turns = [[[sample.texts[agent]] for sample in samples] for agent in range(self.team.num_agents)]
            details = self.eval_logger(
                agent_completions_turns=turns,
                batch_items=[dict(task) for task in tasks],
                prompts=[self.team.prompts(task)[0] for task in tasks],
            )
            aggregate = self.eval_aggregator(details, num_turns=1)
            metrics |= {f"eval/{name}": float(value) for name, value in aggregate.items()}
        return metrics

    def save_model(self, output_dir: str | Path) -> None:
        """Write one plain Hugging Face folder per agent (`agent_0`, ...) below `output_dir`."""
        save_team(self.team, Path(output_dir))

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

    def collect_scored(self, iteration: int, comparator: Comparator | None) -> list[TaskCandidates]:
        """Both sides' scored answers to all training tasks."""
        tasks, args = self.required_tasks(), self.args
        size = args.collection_batch_size or len(tasks)
        scored: list[TaskCandidates] = []
        for start in range(0, len(tasks), size):
            candidates = collect(
                self.team,
                comparator,
                tasks[start : start + size],
                num_candidates=args.preference_num_candidates,
                comparator_num_candidates=getattr(args, "comparator_num_candidates", None),
                sampling=sampling(args),
                seed=args.seed,
                iteration=iteration,
                tokens_per_batch=args.tokens_per_batch,
            )
            scored += score_candidates(candidates, self.oracle).candidates
        return scored

    def on_step(self, metrics: Metrics, environment_steps: int) -> None:
        """Report an optimizer step, and evaluate where `eval_interval` says so."""
        self.environment_steps = environment_steps
        per_epoch = max(1, self._updates_per_epoch)
        if self.args.eval_interval and (metrics["step"] % per_epoch) % self.args.eval_interval == 0:
            self.report(self.evaluate(), environment_steps)
        every = self.args.logging_steps
        if environment_steps // every > (environment_steps - self._steps_of(metrics)) // every:
            self.report({f"train/{k}": float(v) for k, v in metrics.items() if v is not None}, environment_steps)

    _updates_per_epoch = 1

    def _steps_of(self, metrics: Metrics) -> int:
        return int(metrics["pairs"]) * self.args.environment_steps_per_pair

    def report(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to `metrics_callback`; `step` counts environment steps."""
        if metrics and self.metrics_callback is not None:
            self.metrics_callback(metrics, step)

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
        self.team = self._read_team(checkpoint, self.args.agent_devices)
        self.engines = make_engines(self.team, self.args)
        self.environment_steps = load_training_state(checkpoint / STATE, self.engines, self.args)
        self.manifest = manifest

    def _read_team(self, folder: Path, devices: Any) -> Team:
        options = {k: v for k, v in self.model_config.items() if k != "special_tokens"}  # saved with the models
        return load_team_folder(folder, self.formatters, devices, self.team.on_long_prompt, options)

    def folder_or_temporary(self, folder: str | Path | None, what: str) -> Path:
        """`folder`, or a temporary one whose place is said."""
        if folder is not None:
            return Path(folder)
        made = Path(tempfile.mkdtemp(prefix=f"comlrl-{what}-"))
        say_once(f"temporary-{made}", f"no folder was named for {what}: it goes to {made}")
        return made

    def load_past(self, folder: Path, devices: Any) -> Team:
        """A frozen team from a folder of policies, with this trainer's formatters."""
        if not folder.is_dir():
            raise DataError(f"{folder}: the policies that this run compares with are not there")
        return frozen(self._read_team(folder, devices))


def frozen(team: Team) -> Team:
    """The same team, without gradients."""
    for model in team.unique_models:
        model.requires_grad_(False)
    return team
