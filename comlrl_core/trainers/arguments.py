"""Checking what a trainer is given, before any model is loaded."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.config.base import explain
from comlrl_core.config.fields import RunningFields
from comlrl_core.errors import ConfigError
from comlrl_core.notices import say_once
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.loading import identify_reward, load_reward

Config = TypeVar("Config", bound=BaseModel)
Source = str | PreTrainedModel
RewardProcessor = Callable[[float], float]


def config_of(args: Any, kind: type[Config]) -> Config:
    """The trainer's settings: `args`, or the defaults. Another algorithm's config is refused by name."""
    if args is None:
        return kind()
    if type(args) is not kind:
        raise ConfigError(f"args must be a {kind.__name__}, not a {type(args).__name__}")
    return args.model_copy(deep=True)


def count_agents(args: Any, agent_model: Source | None, agents: Sequence[Source] | None, num_agents: int | None) -> int:
    """How many agents there are; only counts that were given explicitly can disagree."""
    if (agent_model is None) == (agents is None):
        raise ConfigError("give either agent_model (one for all agents) or agents (one per agent)")
    given: dict[str, int] = {}
    if agents is not None:
        given["agents"] = len(agents)
    if num_agents is not None:
        given["num_agents"] = num_agents
    if "num_agents" in args.model_fields_set:
        given["args.num_agents"] = args.num_agents
    if len(set(given.values())) > 1:
        raise ConfigError(
            "the number of agents is contradictory: " + ", ".join(f"{k} says {v}" for k, v in given.items())
        )
    if given:
        return next(iter(given.values()))
    return 1 if isinstance(agent_model, PreTrainedModel) else int(args.num_agents)


def identifiers(agent_model: Source | None, agents: Sequence[Source] | None) -> list[str | None]:
    """The names or folders that load the agents' models again; None where an agent has none."""
    sources = [agent_model] if agent_model is not None else list(agents or ())
    return [
        (getattr(source, "name_or_path", None) or None) if isinstance(source, PreTrainedModel) else source
        for source in sources
    ]


def set_agents(args: RunningFields, count: int) -> None:
    """Write the number of agents into the settings; what is given per agent must agree with it."""
    try:
        args.num_agents = count
    except ValidationError as error:
        raise ConfigError(explain(error, "args", type(args))) from None


def check_reward_range(args: MADPOConfig, oracle: Oracle) -> None:
    """A histogram of rewards needs to know between which values they lie."""
    if getattr(args, "log_reward_distribution", False) and oracle.reward_range is None:
        raise ConfigError(
            f"log_reward_distribution needs reward_func.reward_range, a pair (lowest, highest); {oracle.name} has none"
        )


def make_oracle(reward_func: Any, num_agents: int, processor: RewardProcessor | None, on_bad_reward: str) -> Oracle:
    """The reward function as an oracle; a name such as `builtin:length_ratio` is loaded."""
    if reward_func is None:
        raise ConfigError("reward_func is required: a function of one list of texts per agent, or a name")
    if isinstance(reward_func, str):
        func, name, version = load_reward(reward_func)
    else:
        func = reward_func
        name, version = identify_reward(reward_func) if callable(reward_func) else (repr(reward_func), "")
    return Oracle(func, num_agents, processor, on_bad_reward, name=name, version=version)  # type: ignore[arg-type]


def check_evaluation(eval_logger: Any, eval_aggregator: Any) -> None:
    """`eval_logger` and `eval_aggregator` work together."""
    if (eval_logger is None) != (eval_aggregator is None):
        raise ConfigError("eval_logger and eval_aggregator belong together: give both or neither")


def say_untracked(wandb_config: Any) -> None:
    """A published argument that is accepted without effect."""
    if wandb_config is not None:
        say_once(
            "wandb",
            "wandb_config is accepted without effect: runs are tracked with MLflow, see metrics_callback",
        )


def say_one_turn(external_transition: Any) -> None:
    """A published argument that is accepted without effect where one turn is trained on."""
    if external_transition is not None:
        say_once("transition", "external_transition has no effect here: this run trains on one turn")


def refuse_adapter(centralized_comparator_adapter: Any) -> None:
    """A published argument that is not offered yet."""
    if centralized_comparator_adapter is not None:
        raise ConfigError("centralized_comparator_adapter: centralized comparators are not offered yet")
