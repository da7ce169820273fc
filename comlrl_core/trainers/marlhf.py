"""`MARLHFTrainer` and `MARLHFIterTrainer`: pairs teach a reward model, and the reward model teaches the policies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from comlrl_core.algorithms import marlhf
from comlrl_core.algorithms.critic_setup import critic_sources
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import UPDATES, Learned
from comlrl_core.critics.critics import Critics
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import read_jsonl
from comlrl_core.preference.files import iteration_path, read_iteration
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import JointRewardModel, RewardFit, save_reward_model
from comlrl_core.preference.reward_model.files import FOLDER
from comlrl_core.rewards.contract import Oracle
from comlrl_core.store import Manifest, Store
from comlrl_core.team.formatters import FormatterSpec
from comlrl_core.team.team import Team
from comlrl_core.trainers.actor_critic import critics_of, source_names
from comlrl_core.trainers.arguments import RewardProcessor, Source, config_of, count_agents, identifiers
from comlrl_core.trainers.base import PreferenceTrainer
from comlrl_core.trainers.checkpoints import keep_newest
from comlrl_core.trainers.iterative import MADPOIterTrainer
from comlrl_core.trainers.offline import COLLECTION, MADPOTrainer
from comlrl_core.trainers.rollout import TrainingLog
from comlrl_core.trainers.team_trainer import MetricsCallback


class _RewardModelTrainer(PreferenceTrainer):
    """What both MARLHF trainers share: the reward model beside the team."""

    config_class: type[MARLHFConfig] | type[MARLHFIterConfig] = MARLHFConfig
    args: MARLHFConfig | MARLHFIterConfig

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
        critic_model: Any = None,
        critics: Any = None,
        centralized_comparator_adapter: Any = None,
        on_long_prompt: str = "fail",
    ) -> None:
        settings = config_of(args, self.config_class)
        names = identifiers(agent_model, agents)
        self._critic_sources: list[Source] = []
        if settings.needs_critic():
            count = count_agents(settings, agent_model, agents, num_agents)
            self._critic_sources = critic_sources(settings, names, count, critic_model, critics)
        elif critic_model is not None or critics is not None:
            name = "critic_model" if critic_model is not None else "critics"
            raise ConfigError(f"{name} belongs to rl_algorithm: maac or iac, not to {settings.rl_algorithm}")
        if names:  # without any, the number of agents is refused below
            self.reward_source = marlhf.base_source(settings, names)
            marlhf.check_base(settings, self.reward_source)
        self.reward_model: JointRewardModel | None = None
        super().__init__(
            agent_model=agent_model,
            agents=agents,
            num_agents=num_agents,
            tokenizer=tokenizer,
            reward_func=reward_func,
            reward_processor=reward_processor,
            formatters=formatters,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model_config=model_config,
            external_transition=external_transition,
            eval_logger=eval_logger,
            eval_aggregator=eval_aggregator,
            wandb_config=wandb_config,
            metrics_callback=metrics_callback,
            centralized_comparator_adapter=centralized_comparator_adapter,
            on_long_prompt=on_long_prompt,
        )

    def make_critics(self, folder: Path | None) -> Critics | None:
        return critics_of(self, self._critic_sources, folder) if self.args.needs_critic() else None

    def further_identity(self) -> dict[str, Any]:
        own = {"critics": source_names(self._critic_sources)} if self.args.needs_critic() else {}
        return {**super().further_identity(), **own}

    def save_model(self, output_dir: str | Path) -> None:
        """Write one folder per agent (`agent_0`, ...), `critic` and, where one was fitted, `reward_model`.

        All load into a new trainer: `agents=[...]`, `critic_model`, and `reward_model_name` in its settings.
        """
        super().save_model(output_dir)
        self.save_beside(Path(output_dir))

    def save_beside(self, folder: Path) -> None:
        if self.reward_model is not None:
            save_reward_model(self.reward_model, folder / FOLDER)

    def restore(self, checkpoint: Path, manifest: Manifest) -> None:
        super().restore(checkpoint, manifest)
        saved = checkpoint / FOLDER
        self.reward_model = marlhf.fitted_reward_model(self.args, saved) if saved.is_dir() else None

    def keeps_initial(self) -> bool:
        return marlhf.needs_reference(self.args)

    def labeller(self) -> Oracle:
        return marlhf.scoring_oracle(self.args, self.oracle, self.reward_model)

    def reference(self, store: Store) -> Team | None:
        """The run's first policies, frozen, where the update compares with them."""
        if not marlhf.needs_reference(self.args):
            return None
        return self.load_past(store.policy(0), self.args.reference_devices)

    def hooks(self) -> Hooks:
        """What the backend reports."""
        log = TrainingLog(self.args.logging_steps, self.environment_steps, self.report)
        return Hooks(on_batch=self._on_batch, on_rollout=log.rollout, on_step=log.update)

    def _on_batch(self, indices: range, environment_steps: int) -> None:
        every = self.args.eval_interval
        if every and any(index % every == 0 for index in indices):
            self.report(self.evaluate(), environment_steps)


class MARLHFIterTrainer(_RewardModelTrainer, MADPOIterTrainer):
    """Iterative MARLHF.

    Every iteration the team and the comparator answer the training tasks, pairs are made and drawn as by
    `MADPOIterTrainer`, a reward model is fitted to them, and the backend updates the team with its scores.

    Keyword arguments as for `MADPOIterTrainer`, with a `MARLHFIterConfig` as `args`.
    """

    config_class = MARLHFIterConfig
    args: MARLHFIterConfig

    def learn_from(self, records: Sequence[PairRecord], iteration: int, store: Store) -> Learned:
        def on_fitted(model: JointRewardModel, result: RewardFit) -> None:
            self.report(marlhf.prefixed(result.metrics()), self.environment_steps)

        outcome = marlhf.learn(
            self.team,
            self.engines,
            self.required_tasks(),
            records,
            self.oracle,
            self.args,
            iteration=iteration,
            source=self.reward_source,
            newest=self.reward_model,
            environment_steps=self.environment_steps,
            critics=self.critics,
            load_reference=lambda: self.load_past(store.policy(0), self.args.reference_devices),
            model_config=self.model_config,
            hooks=self.hooks(),
            on_fitted=on_fitted,
        )
        self.reward_model = outcome.model
        self.report(outcome.metrics, outcome.learned.environment_steps)
        return outcome.learned


class MARLHFTrainer(_RewardModelTrainer, MADPOTrainer):
    """Offline MARLHF: one collection of the team's own answers, one reward model, passes over the tasks with it.

    Keyword arguments as for `MARLHFIterTrainer`, with a `MARLHFConfig` as `args`.
    """

    config_class = MARLHFConfig
    args: MARLHFConfig

    def epochs_done(self, checkpoint: Path) -> int:
        self._history = read_jsonl(checkpoint / "state" / UPDATES)
        if self.reward_model is None:
            raise DataError(f"{checkpoint / FOLDER}: the reward model of this run is missing")
        return max((int(metrics["epoch"]) + 1 for metrics in self._history), default=0)

    def _learn(
        self, store: Store, start_epoch: int, checkpoints: Path | None, interval: int, limit: int | None
    ) -> None:
        history = self._history if start_epoch else []
        if not start_epoch:
            records = read_iteration(iteration_path(store.replay, COLLECTION))
            self.reward_model, result = marlhf.fit_or_keep(
                records,
                self.args,
                iteration=COLLECTION,
                source=self.reward_source,
                newest=None,
                model_config=self.model_config,
            )
            self.report(marlhf.prefixed(result.metrics()), self.environment_steps)
        model = self.reward_model
        if model is None:
            return
        hooks = self.hooks()

        def on_epoch(done: int, learned: Learned) -> None:
            self.environment_steps = learned.environment_steps
            if checkpoints is not None and (done % interval == 0 or done == self.args.num_train_epochs):
                self.save_checkpoint(checkpoints / f"epoch_{done:04d}", learned)
                keep_newest(checkpoints, limit)

        with marlhf.probing(self.team, model, self.oracle, self.required_tasks(), self.args, COLLECTION) as probes:
            marlhf.update_policies(
                self.team,
                self.engines,
                self.required_tasks(),
                model,
                self.args,
                iteration=COLLECTION,
                learned=Learned(history, self.environment_steps),
                start_epoch=start_epoch,
                critics=self.critics,
                reference=self.reference(store),
                hooks=Hooks(hooks.on_batch, hooks.on_rollout, hooks.on_step, on_epoch),
            )
        self.report(probes.metrics, self.environment_steps)

    _history: list[dict[str, Any]] = []  # noqa: RUF012 - replaced, never changed
