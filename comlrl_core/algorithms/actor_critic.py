"""Actor-critic with teams of language models: MAAC and IAC (arXiv 2601.21972).

    target_t = r_t + discount * V(h_{t+1})            (nothing follows the last turn, or one that was stopped early)
    actor i:   - mean  (target_t - V(h_t)) * log pi_i(a_{i,t} | h_{i,t})
    critic:    value_loss_coef * mean (V(h_t) - target_t)^2

MAAC has one critic on what all agents saw; IAC has a critic per agent, on what that agent saw. They share everything
else. With `critic_type: q` a critic rates a response too, the target is bootstrapped with the next response's value,
and the actor's advantage is Q(h, a) minus what other responses to h are worth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from comlrl_core.algorithms.actor_critic_config import CriticConfig, MAACConfig
from comlrl_core.algorithms.policy_updates import policy_gradients, policy_metrics, step_engines
from comlrl_core.algorithms.rollout_loop import Hooks, LoopSettings, rollout_epoch
from comlrl_core.algorithms.shared import Learned, Metrics, sampling
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.processes import even_share
from comlrl_core.engine.protocol import Engine, agents_by_engine
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.rl.advantages import group_advantages
from comlrl_core.rl.values import clipped_value_loss, value_loss
from comlrl_core.rollout.episodes import EpisodeSample, TemporalDifference, episode_samples
from comlrl_core.rollout.samples import Collected
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import Scorer, TreeShape, grow
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scoring import scoring_mode
from comlrl_core.team.team import Team


@dataclass(frozen=True)
class ActorCriticSettings:
    """What an epoch of actor-critic training needs to know; `rule.kl_coef` above 0 needs a reference.

    Attributes:
        rollout_buffer_size: nodes (turns of episodes) that wait for an update; a buffer holds whole episodes.
        train_batch_size: nodes per optimizer step; None = the buffer.
        micro_batch_size: completions, or a critic's inputs, per forward pass; None = the minibatch.
        collection_batch_size: tasks rolled out together; None = as many as fill the buffer once.
        value_clip_range: None = values are not clipped.

    Raises:
        ConfigError: settings contradict each other.
    """

    sampling: Sampling
    seed: int
    rule: TemporalDifference
    num_generations: int = 1
    num_turns: int = 1
    early_termination_threshold: float | None = None
    advantage_normalization: bool = True
    value_loss_coef: float = 0.6
    value_clip_range: float | None = None
    rollout_buffer_size: int = 8
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    collection_batch_size: int | None = None
    tokens_per_batch: int | None = None
    on_nonfinite: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        if self.num_turns > 1 and self.num_generations != 1:
            raise ConfigError(f"num_generations is {self.num_generations}; allowed is 1 with several turns")
        if not self.sampling.temperature > 0:
            raise ConfigError("temperature must be above 0 in training: a greedy sampler has no log-probabilities")

    @property
    def shape(self) -> TreeShape:
        """How rollouts grow: without branches."""
        return TreeShape(self.num_generations, self.num_turns, "aligned", self.early_termination_threshold)

    def loop(self) -> LoopSettings:
        """How an epoch goes."""
        return LoopSettings(
            seed=self.seed,
            buffer_size=self.rollout_buffer_size,
            batch_size=self.train_batch_size or self.rollout_buffer_size,
            nodes_per_task=self.num_turns,
            collection_batch_size=self.collection_batch_size,
            whole_episodes=True,
            on_nonfinite=self.on_nonfinite,
        )

    def steps_per_epoch(self, num_tasks: int) -> int:
        """Optimizer steps of an epoch in which no episode is stopped early."""
        return self.loop().steps_per_epoch(range(1, self.num_turns + 1), num_tasks)


def actor_critic_settings(config: MAACConfig) -> ActorCriticSettings:
    """What the loop needs of a run's settings."""
    return ActorCriticSettings(
        sampling=sampling(config),
        seed=config.seed,
        rule=rule_of(config, config.discount, config.reference_kl_coef if config.reference_kl_enabled else 0.0),
        num_generations=config.num_generations,
        num_turns=config.num_turns,
        early_termination_threshold=config.early_termination_threshold,
        advantage_normalization=config.advantage_normalization,
        value_loss_coef=config.value_loss_coef,
        value_clip_range=config.clip_range(),
        rollout_buffer_size=config.rollout_buffer_size,
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.micro_batch_size,
        collection_batch_size=config.collection_batch_size,
        tokens_per_batch=config.tokens_per_batch,
        on_nonfinite=config.on_nonfinite_loss,
    )


def rule_of(config: CriticConfig, discount: float, kl_coef: float) -> TemporalDifference:
    """How rewards become targets and advantages."""
    return TemporalDifference(config.critic_type, discount, kl_coef, config.q_baseline_samples)


def actor_critic(
    team: Team,
    engines: Sequence[Engine],
    critics: Critics,
    tasks: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    settings: ActorCriticSettings,
    *,
    num_train_epochs: int,
    iteration: int = 1,
    start_epoch: int = 0,
    learned: Learned | None = None,
    transition: Transition | None = None,
    reference: Team | None = None,
    hooks: Hooks | None = None,
) -> Learned:
    """Train team and critics on `tasks` with the rewards of `scorer`, for epochs `start_epoch` to `num_train_epochs`.

    Args and errors as for `reinforce.reinforce`; `critics` are trained in place like the team.
    """
    if start_epoch == 0:
        begin(engines, critics, num_train_epochs * settings.steps_per_epoch(len(tasks)))
    learned = learned or Learned([], 0)
    for epoch in range(start_epoch, num_train_epochs):
        learned = actor_critic_epoch(
            team,
            engines,
            critics,
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


def begin(engines: Sequence[Engine], critics: Critics, total_steps: int) -> None:
    """Begin the learning-rate schedule of actors and critics anew."""
    for engine, _ in agents_by_engine([*engines, *critics.engines]):
        engine.begin(total_steps)


def actor_critic_epoch(
    team: Team,
    engines: Sequence[Engine],
    critics: Critics,
    tasks: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    settings: ActorCriticSettings,
    *,
    epoch: int = 0,
    iteration: int = 1,
    learned: Learned | None = None,
    transition: Transition | None = None,
    reference: Team | None = None,
    hooks: Hooks | None = None,
) -> Learned:
    """One pass over the tasks, in an order of its own; arguments as for `actor_critic`.

    The metrics of an optimizer step: those of `train_minibatch` and of `rollout_epoch`.
    """
    _check(team, engines, critics, settings, transition, reference)
    stream = (settings.seed, iteration, "rollout", epoch)

    def collect(some: Sequence[Mapping[str, Any]], version: int) -> Collected[EpisodeSample]:
        with gathered(*team.models):  # once for all turns
            levels = grow(
                team,
                scorer,
                some,
                settings.shape,
                sampling=settings.sampling,
                stream=stream,
                transition=transition,
                tokens_per_batch=settings.tokens_per_batch,
            )
            return episode_samples(
                team,
                critics,
                some,
                levels,
                settings.rule,
                sampling=settings.sampling,
                stream=stream,
                version=version,
                reference=reference,
                batch_size=settings.micro_batch_size,
                tokens_per_batch=settings.tokens_per_batch,
            )

    return rollout_epoch(
        tasks,
        settings.loop(),
        collect,
        lambda batch: train_minibatch(team, engines, critics, batch, settings),
        epoch=epoch,
        iteration=iteration,
        learned=learned,
        hooks=hooks,
        prepare=normalised if settings.advantage_normalization else None,
    )


def normalised(samples: Sequence[EpisodeSample]) -> list[EpisodeSample]:
    """The same samples, each agent's advantages centred and divided by their standard deviation, turn by turn.

    A turn with a single advantage keeps it: centring would leave nothing to learn from.
    """
    result = list(samples)
    for turn in sorted({sample.turn for sample in samples}):
        chosen = [index for index, sample in enumerate(samples) if sample.turn == turn]
        columns = []
        for agent in range(len(samples[chosen[0]].advantages)):
            given = [a for index in chosen for a in samples[index].advantages[agent]]
            values = torch.tensor([[a or 0.0 for a in given]], dtype=torch.float64)
            counts = torch.tensor([[a is not None for a in given]])
            if int(counts.sum()) > 1:
                values = group_advantages(values, counts, "mean", normalize=True)
            columns.append(iter([v if a is not None else None for v, a in zip(values[0].tolist(), given, strict=True)]))
        for index in chosen:
            advantages = tuple(
                tuple(next(column) for _ in of_agent)
                for column, of_agent in zip(columns, samples[index].advantages, strict=True)
            )
            result[index] = replace(samples[index], advantages=advantages)
    return result


def train_minibatch(
    team: Team,
    engines: Sequence[Engine],
    critics: Critics,
    samples: Sequence[EpisodeSample],
    settings: ActorCriticSettings,
) -> tuple[Metrics, str]:
    """One optimizer step of every critic, and at most one of every actor, on some nodes of one turn.

    Args:
        samples: `B` nodes; their advantages are those that weigh the policies.

    Returns:
        those of `policy_updates.policy_metrics`, and `value_loss` (mean over critics, without its coefficient),
        `critic_i/value_loss`, `critic_i/grad_norm`, `advantage_mean`, `nonfinite`; and what was not finite ("" if all
        was).
    """
    losses = [_value_gradients(critics, index, samples, settings) for index in range(len(critics.critics))]
    gradients = policy_gradients(
        team.models, engines, team.pad_ids, samples, settings.sampling.temperature, settings.micro_batch_size
    )
    groups = agents_by_engine(engines)
    # A head on an actor's backbone moves that backbone, whatever the advantages are.
    by_value = any(critic.shares_backbone for critic in critics.critics)
    moved = [by_value or any(gradients.trained[agent] for agent in agents) for _, agents in groups]
    finite = gradients.finite and all(map(math.isfinite, losses))
    every = [engine for engine, _ in groups] + critics.engines
    results, nonfinite = step_engines(every, [*moved, *[True] * len(losses)], finite)
    metrics = policy_metrics(gradients, samples, groups, results[: len(groups)])
    for index, (loss, result) in enumerate(zip(losses, results[len(groups) :], strict=True)):
        metrics |= {f"critic_{index}/value_loss": loss, f"critic_{index}/grad_norm": result.grad_norm}
    given = [a for sample in samples for of_agent in sample.advantages for a in of_agent if a is not None]
    return metrics | {
        "value_loss": sum(losses) / len(losses),
        "advantage_mean": sum(given) / max(1, len(given)),
        "skipped": int(any(result.skipped for result in results)),
        "nonfinite": int(bool(nonfinite)),
    }, nonfinite


def _value_gradients(
    critics: Critics, index: int, samples: Sequence[EpisodeSample], settings: ActorCriticSettings
) -> float:
    """Add the gradient of one critic's loss to what is accumulated; the mean squared error without its coefficient."""
    critic = critics.critics[index]
    lessons = [sample.lessons[index] for sample in samples]
    rows = [row for lesson in lessons for row in zip(lesson.inputs, lesson.old_values, lesson.targets, strict=True)]
    rows.sort(key=lambda row: len(row[0]))  # neighbours in length share a forward pass
    count = sum(len(targets) for _, _, targets in rows)
    size = settings.micro_batch_size or len(rows)
    found = 0.0
    with scoring_mode(*critic.modules):
        for start in range(0, len(rows), size):
            own_share = even_share(rows[start : start + size])  # what other processes do not take, and fillers
            some = [row for row, _ in own_share]
            counts = torch.tensor([float(mine) for (_, _, targets), mine in own_share for _ in targets])
            place = torch.tensor([number for number, (_, _, targets) in enumerate(some) for _ in targets])
            aims = torch.tensor([target for _, _, targets in some for target in targets], dtype=torch.float64)
            old = torch.tensor([value for _, value, _ in some], dtype=torch.float64)

            def loss(
                values: Tensor, place: Tensor = place, aims: Tensor = aims, old: Tensor = old, counts: Tensor = counts
            ) -> Tensor:
                place = place.to(values.device)
                own, target = values[place], aims.to(values)
                if settings.value_clip_range is None:
                    errors = value_loss(own, target)
                else:
                    errors = clipped_value_loss(own, old.to(values)[place], target, settings.value_clip_range)
                return settings.value_loss_coef * (errors * counts.to(errors)).sum() / count

            found += critic.backward([ids for ids, _, _ in some], loss)
            if not math.isfinite(found):
                return math.nan
    return found / settings.value_loss_coef if settings.value_loss_coef else 0.0


def _check(
    team: Team,
    engines: Sequence[Engine],
    critics: Critics,
    settings: ActorCriticSettings,
    transition: Transition | None,
    reference: Team | None,
) -> None:
    if len(engines) != team.num_agents:
        raise ConfigError(f"{len(engines)} engines for {team.num_agents} agents")
    if critics.num_agents != team.num_agents:
        raise ConfigError(f"the critics are of {critics.num_agents} agents, the team has {team.num_agents}")
    if settings.num_turns > 1 and transition is None:
        raise ConfigError(f"external_transition is required with num_turns {settings.num_turns}")
    if settings.rule.kl_coef and reference is None:
        raise ConfigError("reference_kl_enabled needs the reference policies, and none were given")
    if reference is not None and reference.num_agents != team.num_agents:
        raise ConfigError(f"the reference has {reference.num_agents} agents, the team {team.num_agents}")
