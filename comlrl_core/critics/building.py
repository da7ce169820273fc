"""The critics that a run's settings name, with their engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.config.engine import EngineSettings
from comlrl_core.critics.critic import Critic, SeparateCritic, SharedCritic
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.files import load_head, open_critic_model
from comlrl_core.critics.layout import check_critic, critic_folder
from comlrl_core.engine.build import build_engine
from comlrl_core.engine.protocol import Engine, OptimizerSettings
from comlrl_core.errors import ConfigError
from comlrl_core.randomness import torch_seed
from comlrl_core.team.scalar import ScalarHead, backbone_of
from comlrl_core.team.team import Team

Source = str | PreTrainedModel


@dataclass(frozen=True)
class CriticPlan:
    """What the critics of a team are.

    Attributes:
        central: one critic on all histories, or one per agent.
        separate: models of their own, or heads on the actors' backbones (never central).
        hidden_dim: hidden layer of a head; None = linear.
        max_length: most tokens that a separate critic reads; None = its context.
        seed: of what the files do not hold.
        devices: of separate critics, one for all or one per critic; None = the GPU if there is one.
    """

    central: bool
    separate: bool
    hidden_dim: int | None
    max_length: int | None
    seed: int
    devices: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.central and not self.separate:
            raise ConfigError("a central critic reads the histories of all agents: it needs a model of its own")

    def count(self, num_agents: int) -> int:
        """How many critics there are."""
        return 1 if self.central else num_agents


def build_critics(
    team: Team,
    actor_engines: Sequence[Engine],
    plan: CriticPlan,
    optimizer: OptimizerSettings,
    sources: Sequence[Source] = (),
    *,
    tokenizers: Sequence[str | PreTrainedTokenizerBase | None] = (),
    model_config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    engine: EngineSettings | None = None,
) -> Critics:
    """The critics with fresh optimizer moments, ready for training.

    Args:
        actor_engines: one per agent; they train the backbones that heads stand on.
        sources: one per critic with a model of its own; unused with `folder`.
        tokenizers: those of loaded models, one per critic, or none.
        folder: where `save_critics` wrote them; None = new ones.
        engine: what trains them; None = plain PyTorch.

    Raises:
        ConfigError: a source is missing or cannot be loaded. DataError: a saved critic is damaged.
    """
    count = plan.count(team.num_agents)
    if folder is None and plan.separate and len(sources) != count:
        raise ConfigError(f"{len(sources)} critic models for {count} critics; give one per critic")
    given = plan.devices
    devices = [given] * count if given is None or isinstance(given, str) else list(given)
    if len(devices) != count:
        raise ConfigError(f"critic_devices names {len(devices)} devices for {count} critics; give one, or one each")
    critics: list[Critic] = []
    for index in range(count):
        saved = None if folder is None else critic_folder(folder, plan.central, index)
        if saved is not None:
            check_critic(saved)
        head_seed = torch_seed("critic", "head", plan.seed, index)
        if plan.separate:
            model = open_critic_model(
                str(saved) if saved is not None else sources[index],
                tokenizer=tokenizers[index] if tokenizers and saved is None else None,
                hidden_dim=plan.hidden_dim,
                max_length=plan.max_length,
                seed=torch_seed("team", "initial weights", plan.seed, index),
                head_seed=head_seed,
                model_config=model_config,
                device=devices[index],
            )
            critics.append(SeparateCritic(model, build_engine(model, optimizer, engine)))
        else:
            agent = team.agents[index]
            head = ScalarHead(backbone_of(agent.model), plan.hidden_dim, head_seed)
            if saved is not None:
                load_head(head, saved)
            head.to(agent.device)
            critics.append(SharedCritic(agent, head, build_engine(head, optimizer, engine), actor_engines[index]))
    return Critics(tuple(critics), plan.central, team.num_agents)


def renew_engines(
    critics: Critics,
    actor_engines: Sequence[Engine],
    optimizer: OptimizerSettings,
    engine: EngineSettings | None = None,
) -> None:
    """Give every critic an engine with fresh optimizer moments; the actors have new ones as well (`actor_engines`)."""
    for index, critic in enumerate(critics.critics):
        critic.engine = build_engine(critic.modules[0], optimizer, engine)
        if isinstance(critic, SharedCritic):
            critic.actor_engine = actor_engines[index]
