"""MARLHF: pairs teach a joint reward model, and the reward model teaches the policies.

    1. fit      r(joint response) from preference pairs (Bradley-Terry)
    2. freeze r; the team samples new joint responses, r scores them, a reward-based backend updates the policies
    3. probe    the task reward scores a few answers of the team before and after: does it follow r?

What every door does in one iteration, each stage a function of its own.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comlrl_core.algorithms.actor_critic import ActorCriticSettings, actor_critic, rule_of
from comlrl_core.algorithms.critic_setup import ANY_MODEL
from comlrl_core.algorithms.marlhf_config import MARLHFIterConfig
from comlrl_core.algorithms.probing import (
    Config,
    Probes,
    ProbeTasks,
    Tasks,
    compare_probes,
    prefixed,
    probe,
    probe_tasks,
    probing,
)
from comlrl_core.algorithms.reinforce import ReinforceSettings, reinforce
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import Learned, Metrics, optimizer_settings, sampling
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.build import build_engine
from comlrl_core.engine.protocol import Engine
from comlrl_core.engine.weights import gathered, is_sharded
from comlrl_core.errors import ConfigError
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import (
    FitSettings,
    JointRewardModel,
    RewardFit,
    fit,
    learned_oracle,
    load_reward_model,
    open_reward_model,
)
from comlrl_core.randomness import generator, torch_seed
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.sources import check_loadable, context_limit
from comlrl_core.team.team import Team

__all__ = [
    "Config",
    "Outcome",
    "ProbeTasks",
    "Probes",
    "backend_settings",
    "base_source",
    "check_base",
    "compare_probes",
    "fit_or_keep",
    "fit_reward_model",
    "fitted_reward_model",
    "learn",
    "needs_reference",
    "new_reward_model",
    "oracle_of",
    "prefixed",
    "probe",
    "probe_tasks",
    "probing",
    "scoring_oracle",
    "starting_model",
    "update_policies",
]

logger = logging.getLogger(__name__)


def base_source(config: Config, agents: Sequence[str | None]) -> str:
    """What the reward model starts from: `reward_model_name`, or the first agent's name or folder.

    `agents` are the sources that the run was given, None for a loaded object. Raises `ConfigError` where neither says.
    """
    if config.reward_model_name is not None:
        return config.reward_model_name
    if not agents or not agents[0]:
        raise ConfigError(
            "reward_model_name is needed: the agents are loaded objects without a name or folder that the reward model "
            "could be loaded from"
        )
    return agents[0]


def check_base(config: Config, source: str) -> None:
    """Refuse, before any work, a reward model's base that is not there or shorter than `reward_max_length`.

    Of a name on the Hugging Face hub, its configuration is read.
    """
    check_loadable("reward_model_name", source)
    limit = context_limit(source)
    if limit is not None and config.reward_max_length is not None and config.reward_max_length > limit:
        raise ConfigError(
            f"reward_max_length {config.reward_max_length} is above the context of {source!r}, {limit} tokens"
        )


def new_reward_model(
    config: Config, source: str, iteration: int, model_config: Mapping[str, Any] | None = None
) -> JointRewardModel:
    """A fresh reward model from its base; from `builtin:tiny` with the first agent's initial weights.

    `model_config` is the agents'. A base of another name takes from it what is true of any model (`ANY_MODEL`).
    """
    options = dict(model_config or {})
    if config.reward_model_name is not None:
        options = {name: value for name, value in options.items() if name in ANY_MODEL}
    model = open_reward_model(
        source,
        config.num_agents,
        seed=torch_seed("team", "initial weights", config.seed, 0),
        head_seed=torch_seed(config.seed, iteration, "reward model", "head"),
        max_length=config.reward_max_length,
        model_config=options,
        device=_device(config),
    )
    return model.freeze_backbone() if config.reward_freeze_backbone else model


def fitted_reward_model(config: Config, folder: Path) -> JointRewardModel:
    """The frozen reward model that lies in `folder`."""
    return load_reward_model(folder, device=_device(config))


def starting_model(
    config: Config,
    source: str,
    iteration: int,
    previous: JointRewardModel | None,
    model_config: Mapping[str, Any] | None = None,
) -> JointRewardModel:
    """What this iteration's fit starts from: the previous reward model where the settings say so and there is one."""
    if isinstance(config, MARLHFIterConfig) and config.reward_model_init == "previous" and previous is not None:
        previous.requires_grad_(True)
        return previous.freeze_backbone() if config.reward_freeze_backbone else previous
    return new_reward_model(config, source, iteration, model_config)


def fit_reward_model(
    model: JointRewardModel,
    records: Sequence[PairRecord],
    config: Config,
    *,
    iteration: int,
    on_step: Callable[[Metrics], None] | None = None,
) -> RewardFit:
    """Fit `model` in place with fresh optimizer moments, and freeze it."""
    settings = replace(optimizer_settings(config), learning_rate=config.reward_learning_rate)

    def engine(trained: JointRewardModel) -> Engine:
        return build_engine(trained, settings, config.engine)

    def order(epoch: int, count: int) -> list[int]:
        return [int(i) for i in generator(config.seed, iteration, "reward model", "order", epoch).permutation(count)]

    result = fit(
        model,
        engine,
        records,
        FitSettings(
            train_batch_size=config.reward_train_batch_size,
            micro_batch_size=config.micro_batch_size,
            num_train_epochs=config.reward_num_train_epochs,
            center_rewards_coef=config.center_rewards_coef,
            eval_fraction=config.reward_eval_fraction,
            on_nonfinite=config.on_nonfinite_loss,
        ),
        order=order,
        on_step=on_step,
    )
    model.requires_grad_(False)
    return result


def scoring_oracle(config: Config, oracle: Oracle, newest: JointRewardModel | None) -> Oracle:
    """Who decides the pairs: the task reward, or the newest reward model where the settings say so and there is one."""
    learned = isinstance(config, MARLHFIterConfig) and config.preference_scoring_reward == "reward_model"
    return oracle_of(config, newest) if learned and newest is not None else oracle


def oracle_of(config: Config, model: JointRewardModel) -> Oracle:
    """The reward model as an oracle."""
    return learned_oracle(model, config.on_bad_reward, config.tokens_per_batch)


def backend_settings(config: Config) -> ReinforceSettings:
    """What the loop of a backend without critics needs of the settings."""
    return ReinforceSettings(
        sampling=sampling(config),
        seed=config.seed,
        num_generations=config.num_generations,
        advantage_mode=config.baseline(),
        advantage_normalization=config.advantage_normalization,
        kl_coef=config.reference_kl_coef if config.reference_kl_enabled else 0.0,
        rollout_buffer_size=config.rollout_buffer_size,
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.micro_batch_size,
        tokens_per_batch=config.tokens_per_batch,
        on_nonfinite=config.on_nonfinite_loss,
    )


def actor_critic_backend(config: Config) -> ActorCriticSettings:
    """What the actor-critic loop needs of the settings."""
    return ActorCriticSettings(
        sampling=sampling(config),
        seed=config.seed,
        rule=rule_of(config, 1.0, config.reference_kl_coef if config.reference_kl_enabled else 0.0),
        num_generations=config.num_generations,
        advantage_normalization=config.advantage_normalization,
        value_loss_coef=config.value_loss_coef,
        value_clip_range=config.clip_range(),
        rollout_buffer_size=config.rollout_buffer_size,
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.micro_batch_size,
        tokens_per_batch=config.tokens_per_batch,
        on_nonfinite=config.on_nonfinite_loss,
    )


def needs_reference(config: Config) -> bool:
    """Whether the update compares the policies with the run's initial ones."""
    return bool(config.reference_kl_enabled and config.reference_kl_coef)


def update_policies(
    team: Team,
    engines: Sequence[Engine],
    tasks: Tasks,
    model: JointRewardModel,
    config: Config,
    *,
    iteration: int,
    learned: Learned,
    start_epoch: int = 0,
    critics: Critics | None = None,
    reference: Team | None = None,
    hooks: Hooks | None = None,
) -> Learned:
    """`num_train_epochs` passes of the backend over the tasks, with the reward model's scores.

    Arguments as for `reinforce` and `actor_critic`, whose backends need `critics`; `learned` holds the environment
    steps before this call (and, for a later `start_epoch`, the history so far).
    """
    epochs: dict[str, Any] = {
        "num_train_epochs": config.num_train_epochs,
        "iteration": iteration,
        "start_epoch": start_epoch,
        "learned": learned,
        "reference": reference,
        "hooks": hooks,
    }
    scorer = oracle_of(config, model)
    if not config.needs_critic():
        return reinforce(team, engines, tasks, scorer, backend_settings(config), **epochs)
    if critics is None:
        raise ConfigError(f"rl_algorithm: {config.rl_algorithm} needs critics, and none were given")
    return actor_critic(team, engines, critics, tasks, scorer, actor_critic_backend(config), **epochs)


@dataclass(frozen=True)
class Outcome:
    """What an iteration did after its pairs were drawn.

    Attributes:
        learned: the metrics of each optimizer step of the policies, and the environment steps so far.
        model: the newest reward model: this iteration's, or the one before where there was nothing to fit.
        fit: what the fit did.
        metrics: the fit's and the probes' measures, `reward_model/...`.
    """

    learned: Learned
    model: JointRewardModel | None
    fit: RewardFit
    metrics: dict[str, float]


def learn(
    team: Team,
    engines: Sequence[Engine],
    tasks: Tasks,
    records: Sequence[PairRecord],
    oracle: Oracle,
    config: Config,
    *,
    iteration: int,
    source: str,
    newest: JointRewardModel | None = None,
    environment_steps: int = 0,
    critics: Critics | None = None,
    load_reference: Callable[[], Team] | None = None,
    model_config: Mapping[str, Any] | None = None,
    hooks: Hooks | None = None,
    on_fitted: Callable[[JointRewardModel, RewardFit], None] | None = None,
) -> Outcome:
    """Fit, update, probe. Without a pair to fit, the policies stay as they are, and this is said.

    Args:
        engines: one per agent.
        oracle: the task reward, for the probes.
        source: `base_source` of the run.
        newest: the reward model of the iteration before; with `reward_model_init: previous` it is trained on.
        critics: of the actor-critic backends, trained in place.
        load_reference: loads the run's first team; called with a reference KL alone.
        on_fitted: called with the frozen reward model before the policies move.
    """
    model, result = fit_or_keep(
        records, config, iteration=iteration, source=source, newest=newest, model_config=model_config
    )
    metrics = prefixed(result.metrics())
    if not result.train_pairs or model is None:
        return Outcome(Learned([], environment_steps), model, result, metrics)
    if on_fitted is not None:
        on_fitted(model, result)
    with probing(team, model, oracle, tasks, config, iteration) as probes:
        learned = update_policies(
            team,
            engines,
            tasks,
            model,
            config,
            iteration=iteration,
            learned=Learned([], environment_steps),
            critics=critics,
            reference=load_reference() if needs_reference(config) and load_reference is not None else None,
            hooks=hooks,
        )
    return Outcome(learned, model, result, metrics | probes.metrics)


def fit_or_keep(
    records: Sequence[PairRecord],
    config: Config,
    *,
    iteration: int,
    source: str,
    newest: JointRewardModel | None,
    model_config: Mapping[str, Any] | None = None,
) -> tuple[JointRewardModel | None, RewardFit]:
    """The iteration's frozen reward model and its fit; `newest` as it is where there is nothing to fit.

    `model_config` goes to the model loader, as for the agents.
    """
    if not records:
        result = RewardFit([], 0, {"too_long": 0, "equal_sides": 0}, None)
        model = newest
    else:
        model = starting_model(config, source, iteration, newest, model_config)
        result = fit_reward_model(model, records, config, iteration=iteration)
        if not result.train_pairs:
            model = newest
        elif is_sharded(model):  # scores are asked of one process, which needs all of it
            whole = new_reward_model(config, source, iteration, model_config)
            with gathered(model):
                whole.load_state_dict(model.state_dict())
            model = whole.requires_grad_(False)
    if not result.train_pairs:
        logger.warning(
            "iteration %d: there are no pairs to fit a reward model to (%d drawn, %d too long, %d with equal sides); "
            "the policies stay as they are",
            iteration,
            len(records),
            result.dropped["too_long"],
            result.dropped["equal_sides"],
        )
    return model, result


def _device(config: Config) -> str | None:
    return None if config.reward_model_device == "auto" else config.reward_model_device
