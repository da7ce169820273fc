"""`MAACTrainer` and `IACTrainer` with their configs, as published."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.algorithms.actor_critic import actor_critic, actor_critic_settings
from comlrl_core.algorithms.actor_critic_config import IACConfig, MAACConfig
from comlrl_core.algorithms.critic_setup import critic_sources, make_critics
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import Learned
from comlrl_core.critics.critics import Critics
from comlrl_core.team.formatters import FormatterSpec
from comlrl_core.team.team import Team
from comlrl_core.trainers.arguments import RewardProcessor, Source, config_of, count_agents, identifiers
from comlrl_core.trainers.rollout import RolloutTrainer
from comlrl_core.trainers.team_trainer import MetricsCallback

__all__ = ["IACConfig", "IACTrainer", "MAACConfig", "MAACTrainer"]


class MAACTrainer(RolloutTrainer):
    """Multi-agent actor-critic: one critic on what all agents saw tells every agent how good its turn was.

    Keyword arguments as for `MAGRPOTrainer`, with a `MAACConfig` as `args`, and `critic_model` (a name, a folder or a
    loaded model) or `critics` (a list of them, one per critic). Without both, critics start from
    `args.critic_model_name`, or from the agents' own name or folder. A loaded critic reads with `tokenizer` (the first
    agent's where that is not given).
    """

    config_class: type[MAACConfig] = MAACConfig
    args: MAACConfig

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
        args: MAACConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        model_config: Mapping[str, Any] | None = None,
        critic_model: Source | None = None,
        critics: Sequence[Source] | None = None,
        external_transition: Callable[..., Any] | None = None,
        eval_logger: Callable[..., Any] | None = None,
        eval_aggregator: Callable[..., Any] | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        metrics_callback: MetricsCallback | None = None,
        on_long_prompt: str = "fail",
    ) -> None:
        settings = config_of(args, self.config_class)
        count = count_agents(settings, agent_model, agents, num_agents)
        self._critic_sources = critic_sources(settings, identifiers(agent_model, agents), count, critic_model, critics)
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
            on_long_prompt=on_long_prompt,
        )

    def make_critics(self, folder: Path | None) -> Critics:
        return critics_of(self, self._critic_sources, folder)

    def learn(
        self,
        tasks: Sequence[Mapping[str, Any]],
        start_epoch: int,
        learned: Learned,
        reference: Team | None,
        hooks: Hooks,
    ) -> None:
        assert self.critics is not None
        actor_critic(
            self.team,
            self.engines,
            self.critics,
            tasks,
            self.oracle,
            actor_critic_settings(self.args),
            num_train_epochs=self.args.num_train_epochs,
            start_epoch=start_epoch,
            learned=learned,
            transition=self.transition,
            reference=reference,
            hooks=hooks,
        )

    def further_identity(self) -> dict[str, Any]:
        return {**super().further_identity(), "critics": source_names(self._critic_sources)}

    def turn_discount(self) -> float:
        return self.args.discount


class IACTrainer(MAACTrainer):
    """Independent actor-critic: every agent has a critic of its own, on what that agent saw.

    Keyword arguments as for `MAACTrainer`, with an `IACConfig` as `args`.
    """

    config_class = IACConfig
    args: IACConfig


def critics_of(trainer: Any, sources: Sequence[Source], folder: Path | None) -> Critics:
    """The critics of a trainer that has its team and its engines already."""
    tokenizers = [
        trainer.team.agents[min(index, trainer.team.num_agents - 1)].tokenizer
        if isinstance(source, PreTrainedModel)
        else None
        for index, source in enumerate(sources)
    ]
    return make_critics(
        trainer.team,
        trainer.engines,
        trainer.args,
        sources,
        tokenizers=tokenizers,
        model_config=trainer.model_config,
        folder=folder,
    )


def source_names(sources: Sequence[Source]) -> list[str]:
    """What critics start from, as plain values: of a loaded model its name or class."""
    return [
        source if isinstance(source, str) else (getattr(source, "name_or_path", "") or type(source).__name__)
        for source in sources
    ]
