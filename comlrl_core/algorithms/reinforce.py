"""The REINFORCE family: rollouts, credits, policy gradients (MAGRPO arXiv 2508.04652, MARLOO, MAReMax, MAREINFORCE).

    loss_i = - mean_k  A_k log pi_i(a_{i,k} | h_i)

At every rollout node each agent samples K completions, the returns of the joint responses give every completion its
advantage, and each agent's log-probabilities are weighted by them. With one agent this is GRPO, RLOO, ReMax or
REINFORCE. There is no importance ratio: by default every update trains on samples of the current policies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from comlrl_core.algorithms.policy_updates import policy_gradients, policy_metrics, step_engines
from comlrl_core.algorithms.reinforce_config import MAGRPOConfig
from comlrl_core.algorithms.rollout_loop import Hooks, LoopSettings, rollout_epoch
from comlrl_core.algorithms.shared import Learned, Metrics, sampling
from comlrl_core.engine.protocol import Engine, agents_by_engine
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.rl.advantages import AdvantageMode
from comlrl_core.rl.returns import CrossAggregation
from comlrl_core.rollout.buffer import NodeSample
from comlrl_core.rollout.samples import Collected, Credit, node_samples
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import JointMode, Scorer, TreeShape, grow
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team


@dataclass(frozen=True)
class ReinforceSettings:
    """What an epoch of reward-based training needs to know; `kl_coef` above 0 needs a reference.

    Raises:
        ConfigError: a value is out of bounds.
    """

    sampling: Sampling
    seed: int
    num_generations: int = 4
    num_turns: int = 1
    joint_mode: JointMode = "aligned"
    cross_aggregation: CrossAggregation = "sum"
    tree_discount: float = 1.0
    early_termination_threshold: float | None = None
    advantage_mode: AdvantageMode = "mean"
    advantage_normalization: bool = True
    kl_coef: float = 0.0
    rollout_buffer_size: int = 2  # nodes
    train_batch_size: int | None = None  # nodes per optimizer step; None = the buffer
    micro_batch_size: int | None = None  # completions per forward pass of an agent; None = the minibatch
    collection_batch_size: int | None = None  # tasks rolled out together; None = as many as fill the buffer once
    tokens_per_batch: int | None = None
    on_nonfinite: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        sizes = ("train_batch_size", "micro_batch_size", "collection_batch_size")
        checks = {
            "num_generations": (self.num_generations >= 2, "an integer >= 2"),
            "num_turns": (self.num_turns >= 1, "an integer >= 1"),
            "joint_mode": (self.joint_mode in get_args(JointMode), f"one of {', '.join(get_args(JointMode))}"),
            "advantage_mode": (
                self.advantage_mode in get_args(AdvantageMode),
                f"one of {', '.join(get_args(AdvantageMode))}",
            ),
            "cross_aggregation": (self.cross_aggregation in get_args(CrossAggregation), "one of sum, mean"),
            "tree_discount": (0 <= self.tree_discount <= 1, "in [0, 1]"),
            "kl_coef": (math.isfinite(self.kl_coef) and self.kl_coef >= 0, "a finite number >= 0"),
            "rollout_buffer_size": (self.rollout_buffer_size >= 1, "an integer >= 1"),
            "on_nonfinite": (self.on_nonfinite in ("fail", "skip"), "one of fail, skip"),
            **{name: ((getattr(self, name) or 1) >= 1, "None or an integer >= 1") for name in sizes},
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed is {allowed}")
        if not self.sampling.temperature > 0:
            raise ConfigError("temperature must be above 0 in training: a greedy sampler has no log-probabilities")

    @property
    def shape(self) -> TreeShape:
        """How the trees grow."""
        return TreeShape(self.num_generations, self.num_turns, self.joint_mode, self.early_termination_threshold)

    def loop(self, num_agents: int) -> LoopSettings:
        """How an epoch goes."""
        return LoopSettings(
            seed=self.seed,
            buffer_size=self.rollout_buffer_size,
            batch_size=self.train_batch_size or self.rollout_buffer_size,
            nodes_per_task=self.shape.nodes_per_task(num_agents),
            collection_batch_size=self.collection_batch_size,
            whole_episodes=False,
            on_nonfinite=self.on_nonfinite,
        )

    @property
    def credit(self) -> Credit:
        """How returns become advantages."""
        return Credit(
            self.advantage_mode,
            self.advantage_normalization,
            self.joint_mode,
            self.cross_aggregation,
            self.tree_discount,
            self.kl_coef,
        )


def reinforce_settings(config: MAGRPOConfig) -> ReinforceSettings:
    """What the loop needs of a run's settings."""
    return ReinforceSettings(
        sampling=sampling(config),
        seed=config.seed,
        num_generations=config.num_generations,
        num_turns=config.num_turns,
        joint_mode=config.joint_mode,
        cross_aggregation=config.cross_aggregation,
        tree_discount=config.tree_discount,
        early_termination_threshold=config.early_termination_threshold,
        advantage_mode=config.advantage_mode,
        advantage_normalization=config.advantage_normalization,
        kl_coef=config.reference_kl_coef if config.reference_kl_enabled else 0.0,
        rollout_buffer_size=config.rollout_buffer_size,
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.micro_batch_size,
        collection_batch_size=config.collection_batch_size,
        tokens_per_batch=config.tokens_per_batch,
        on_nonfinite=config.on_nonfinite_loss,
    )


def reinforce(
    team: Team,
    engines: Sequence[Engine],
    tasks: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    settings: ReinforceSettings,
    *,
    num_train_epochs: int,
    iteration: int = 1,
    start_epoch: int = 0,
    learned: Learned | None = None,
    transition: Transition | None = None,
    reference: Team | None = None,
    hooks: Hooks | None = None,
) -> Learned:
    """Train the team on `tasks` with the rewards of `scorer`, for epochs `start_epoch` to `num_train_epochs`.

    Args:
        engines: one per agent, the same object where the model is the same.
        scorer: an `Oracle`, or whatever answers like one (a reward model).
        iteration: names the random streams, with seed and epoch.
        start_epoch: first epoch to train; the learning-rate schedule begins anew with epoch 0, and goes on from the
            engines' loaded state otherwise.
        learned: what the epochs (or iterations) before left: its history is continued and its steps are counted on.
        transition: between turns; required with several.
        reference: frozen policies; required with a `kl_coef` above 0.

    Returns:
        the metrics of every optimizer step, those of `learned` included, and the environment steps so far.

    Raises:
        ConfigError: something that the settings need is missing.
        TrainingError: a loss or gradient is not finite and `on_nonfinite` is "fail", or this happened three times in
            a row.
    """
    _check(team, engines, settings, transition, reference)
    if start_epoch == 0:
        for engine, _ in agents_by_engine(engines):
            engine.begin(num_train_epochs * steps_per_epoch(len(tasks), team.num_agents, settings))
    learned = learned or Learned([], 0)
    for epoch in range(start_epoch, num_train_epochs):
        learned = reinforce_epoch(
            team,
            engines,
            tasks,
            scorer,
            settings,
            epoch=epoch,
            iteration=iteration,
            learned=learned,
            transition=transition,
            reference=reference,
            hooks=hooks,
        )
        if hooks is not None and hooks.on_epoch is not None:
            hooks.on_epoch(epoch + 1, learned)
    return learned


def reinforce_epoch(
    team: Team,
    engines: Sequence[Engine],
    tasks: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    settings: ReinforceSettings,
    *,
    epoch: int = 0,
    iteration: int = 1,
    learned: Learned | None = None,
    transition: Transition | None = None,
    reference: Team | None = None,
    hooks: Hooks | None = None,
) -> Learned:
    """One pass over the tasks, in an order of its own; arguments as for `reinforce`.

    The metrics of an optimizer step: those of `train_minibatch` and of `rollout_epoch`.
    """
    _check(team, engines, settings, transition, reference)

    def collect(some: Sequence[Mapping[str, Any]], version: int) -> Collected[NodeSample]:
        with gathered(*team.models):  # once for all turns
            levels = grow(
                team,
                scorer,
                some,
                settings.shape,
                sampling=settings.sampling,
                stream=(settings.seed, iteration, "rollout", epoch),
                transition=transition,
                tokens_per_batch=settings.tokens_per_batch,
            )
            return node_samples(
                team,
                levels,
                settings.credit,
                temperature=settings.sampling.temperature,
                max_new_tokens=settings.sampling.max_new_tokens,
                version=version,
                reference=reference if settings.kl_coef else None,
                batch_size=settings.micro_batch_size,
            )

    def train(batch: list[NodeSample]) -> tuple[Metrics, str]:
        return train_minibatch(
            team.models, engines, team.pad_ids, batch, settings.sampling.temperature, settings.micro_batch_size
        )

    return rollout_epoch(
        tasks,
        settings.loop(team.num_agents),
        collect,
        train,
        epoch=epoch,
        iteration=iteration,
        learned=learned,
        hooks=hooks,
    )


def steps_per_epoch(num_tasks: int, num_agents: int, settings: ReinforceSettings) -> int:
    """Optimizer steps of an epoch in which every tree grows to its full size."""
    branches = len(settings.shape.joint_indices(num_agents))
    turns = [turn for turn in range(settings.num_turns) for _ in range(branches**turn)]
    return settings.loop(num_agents).steps_per_epoch(turns, num_tasks)


def train_minibatch(
    models: Sequence[nn.Module],
    engines: Sequence[Engine],
    pad_ids: Sequence[int],
    samples: Sequence[NodeSample],
    temperature: float,
    micro_batch_size: int | None = None,
) -> tuple[Metrics, str]:
    """At most one optimizer step of every engine on the samples of some nodes of one turn.

    The loss of an agent is the mean over the nodes of the mean over the node's completions that count, however it is
    split into micro-batches. Completions with an advantage of 0 are not scored: they move nothing. An engine without
    any other completion is not stepped (its momentum alone would move it).

    Args:
        models, engines, pad_ids: one per agent.
        samples: `B` nodes.
        temperature: of the sampler; log-probabilities are scored at it.
        micro_batch_size: completions per forward pass of an agent; None: all.

    Returns:
        `loss` (mean over agents), `agent_i/loss`, `agent_i/grad_norm`, `grad_norm` (before clipping),
        `learning_rate`, `advantage_std`, `entropy` (sampled estimate in nats per token: minus the mean log-probability
        of the tokens that were scored), `frac_zero_std`, `turn`, `nodes`, `completions`, `dropped_completions`,
        `skipped` (1: some engine was not stepped), `nonfinite` (1: for a loss or gradient that is not finite); and
        what was not finite ("" if all was).
    """
    gradients = policy_gradients(models, engines, pad_ids, samples, temperature, micro_batch_size)
    groups = agents_by_engine(engines)
    moved = [any(gradients.trained[agent] for agent in agents) for _, agents in groups]
    results, nonfinite = step_engines([engine for engine, _ in groups], moved, gradients.finite)

    alike = [zero for sample in samples for zero in sample.zero_std]
    return policy_metrics(gradients, samples, groups, results) | {
        "frac_zero_std": sum(alike) / len(alike),
        "nonfinite": int(bool(nonfinite)),
    }, nonfinite


def _check(
    team: Team,
    engines: Sequence[Engine],
    settings: ReinforceSettings,
    transition: Transition | None,
    reference: Team | None,
) -> None:
    if len(engines) != team.num_agents:
        raise ConfigError(f"{len(engines)} engines for {team.num_agents} agents")
    if settings.num_turns > 1 and transition is None:
        raise ConfigError(f"external_transition is required with num_turns {settings.num_turns}")
    if settings.kl_coef and reference is None:
        raise ConfigError("reference_kl_enabled needs the reference policies, and none were given")
    if reference is not None and reference.num_agents != team.num_agents:
        raise ConfigError(f"the reference has {reference.num_agents} agents, the team {team.num_agents}")
    settings.shape.nodes_per_task(team.num_agents)
