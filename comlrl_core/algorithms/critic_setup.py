"""From a run's settings to its critics: where they come from, and what is refused before a model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.algorithms.actor_critic_config import CriticConfig
from comlrl_core.algorithms.shared import OptimizationConfig, optimizer_settings
from comlrl_core.critics.building import CriticPlan, Source, build_critics
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.protocol import Engine, OptimizerSettings
from comlrl_core.errors import ConfigError
from comlrl_core.team.sources import check_loadable, context_limit
from comlrl_core.team.team import Team

ANY_MODEL = ("dtype", "torch_dtype", "attn_implementation")  # what is true of a model of any name


class TrainedCriticConfig(CriticConfig, OptimizationConfig, Protocol):
    """Settings of critics and of their optimizer."""


def critic_plan(config: CriticConfig) -> CriticPlan:
    """What the settings say about critics."""
    return CriticPlan(
        central=config.has_central_critic(),
        separate=config.has_separate_critic(),
        hidden_dim=config.head_hidden_dim(),
        max_length=config.critic_max_length,
        seed=config.seed,
        devices=config.critic_devices,
    )


def critic_sources(
    config: CriticConfig,
    agents: Sequence[str | None],
    num_agents: int,
    critic_model: Source | None = None,
    critics: Sequence[Source] | None = None,
) -> list[Source]:
    """What each critic with a model of its own starts from; empty for heads on the actors' backbones.

    Args:
        agents: the sources that the run was given (one for all, or one per agent), None for a loaded object without a
            name.
        critic_model: one source for all critics. `critics`: one per critic. Without both, `critic_model_name` decides,
            and without that the agents' own.

    Raises:
        ConfigError: a critic has no source, or several, or one that cannot be loaded.
    """
    plan = critic_plan(config)
    count = plan.count(num_agents)
    given = {"critic_model": critic_model, "critics": critics, "critic_model_name": config.critic_model_name}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both name the critics; give one of them")
    if not plan.separate:
        if named:
            raise ConfigError(f"{named[0]} contradicts use_separate_critic: false; leave one of them out")
        return []
    if critics is not None:
        if isinstance(critics, str) or len(critics) != count:
            raise ConfigError(
                f"critics must be a list with {count} model{'s' if count > 1 else ''}: "
                + ("one that sees all agents" if plan.central else "one per agent")
            )
        sources = list(critics)
    elif isinstance(critic_model, PreTrainedModel) and count > 1:
        raise ConfigError("a loaded critic_model is one critic; give one per agent in critics, or a name or folder")
    else:
        source = critic_model if critic_model is not None else config.critic_model_name
        own = list(agents) * num_agents if len(agents) == 1 else list(agents)
        wanted = [source] * count if source is not None else own[:count]
        sources = [one for one in wanted if one]
        if len(sources) != count:
            raise ConfigError(
                "critic_model is needed: the agents are loaded objects without a name or folder that a critic could be "
                "loaded from"
            )
    if len({id(one) for one in sources if isinstance(one, PreTrainedModel)}) < sum(
        isinstance(one, PreTrainedModel) for one in sources
    ):
        raise ConfigError("critics names one loaded model twice; every critic needs a model of its own")
    setting = named[0] if named else "critic_model_name"
    for name in dict.fromkeys(one for one in sources if isinstance(one, str)):
        check_critic_source(config, name, setting)
    return sources


def check_critic_source(config: CriticConfig, source: str, setting: str = "critic_model_name") -> None:
    """Refuse, before any work, a critic's base that is not there or shorter than `critic_max_length`."""
    check_loadable(setting, source)
    limit = context_limit(source)
    if limit is not None and config.critic_max_length is not None and config.critic_max_length > limit:
        raise ConfigError(
            f"critic_max_length {config.critic_max_length} is above the context of {source!r}, {limit} tokens"
        )


def make_critics(
    team: Team,
    actor_engines: Sequence[Engine],
    config: TrainedCriticConfig,
    sources: Sequence[Source],
    *,
    tokenizers: Sequence[str | PreTrainedTokenizerBase | None] = (),
    model_config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Critics:
    """The run's critics with fresh optimizer moments: new ones from `critic_sources`, or those in `folder`.

    `model_config` is the agents', with `critic_model_kwargs` in the place of its `model_kwargs`; a base of another name
    takes from it what is true of any model.
    """
    options = dict(model_config or {})
    own = options.pop("critic_model_kwargs", None)
    if config.critic_model_name is not None:
        options = {name: value for name, value in options.items() if name in ANY_MODEL}
    if own is not None:
        options["model_kwargs"] = own
    return build_critics(
        team,
        actor_engines,
        critic_plan(config),
        critic_optimizer(config),
        sources,
        tokenizers=tokenizers,
        model_config=options,
        folder=folder,
        engine=config.engine,
    )


def critic_optimizer(config: TrainedCriticConfig) -> OptimizerSettings:
    """The agents' optimizer settings with the critics' learning rate."""
    return replace(optimizer_settings(config), learning_rate=config.critic_rate())
