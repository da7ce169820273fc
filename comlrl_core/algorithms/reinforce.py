"""The REINFORCE family: rollouts, credits, policy gradients (MAGRPO arXiv 2508.04652, MARLOO, MAReMax, MAREINFORCE).

    loss_i = - mean_k  A_k log pi_i(a_{i,k} | h_i)

At every rollout node each agent samples K completions, the returns of the joint responses give every completion its
advantage, and each agent's log-probabilities are weighted by them. With one agent this is GRPO, RLOO, ReMax or
REINFORCE. There is no importance ratio: by default every update trains on samples of the current policies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from comlrl_core.algorithms.reinforce_config import MAGRPOConfig
from comlrl_core.algorithms.shared import NONFINITE_LIMIT, Learned, Metrics, sampling
from comlrl_core.engine.processes import even_share, total
from comlrl_core.engine.protocol import Engine, StepResult, agents_by_engine
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError, TrainingError
from comlrl_core.progress import progress
from comlrl_core.randomness import generator
from comlrl_core.rl.advantages import AdvantageMode
from comlrl_core.rl.logprobs import sequence_logprobs
from comlrl_core.rl.policy_gradient import reinforce_loss
from comlrl_core.rl.returns import CrossAggregation
from comlrl_core.rollout.buffer import NodeSample, RolloutBuffer, minibatches
from comlrl_core.rollout.samples import Credit, node_samples
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import JointMode, Scorer, TreeShape, grow
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scoring import score_completions, scoring_mode
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


@dataclass(frozen=True)
class Hooks:
    """What a caller wants to be told; steps are environment steps (joint responses scored so far).

    Attributes:
        on_batch: before some tasks are rolled out: the indices of these within the epoch, steps.
        on_rollout: the metrics of a collection (see `rollout.samples.node_samples`), steps.
        on_step: the metrics of an optimizer step (see `reinforce_epoch`), steps.
        on_epoch: number of epochs done, all that was learned so far.
    """

    on_batch: Callable[[range, int], None] | None = None
    on_rollout: Callable[[Metrics, int], None] | None = None
    on_step: Callable[[Metrics, int], None] | None = None
    on_epoch: Callable[[int, Learned], None] | None = None


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

    The metrics of an optimizer step: those of `train_minibatch`, `epoch`, `iteration`, `step` (from 0 over the run),
    `environment_steps`, `sample_age` (optimizer steps between sampling and training, mean over the nodes).
    """
    _check(team, engines, settings, transition, reference)
    hooks = hooks or Hooks()
    history = list(learned.history) if learned else []
    steps = learned.environment_steps if learned else 0
    nodes_per_task = settings.shape.nodes_per_task(team.num_agents)
    buffer = RolloutBuffer(settings.rollout_buffer_size, settings.train_batch_size)
    order = generator(settings.seed, iteration, "rollout", "order", epoch).permutation(len(tasks)).tolist()

    def update() -> None:
        for batch in buffer.drain():
            age = sum(len(history) - sample.version for sample in batch) / len(batch)
            metrics, nonfinite = train_minibatch(
                team.models, engines, team.pad_ids, batch, settings.sampling.temperature, settings.micro_batch_size
            )
            metrics |= {"epoch": epoch, "iteration": iteration, "step": len(history)}
            metrics |= {"environment_steps": steps, "sample_age": age}
            history.append(metrics)
            if hooks.on_step is not None:
                hooks.on_step(metrics, steps)
            if nonfinite:
                _refuse_nonfinite(nonfinite, history, settings.on_nonfinite)

    with progress(f"epoch {epoch + 1}: rollouts and updates", len(tasks), "task") as bar:
        position = 0
        while position < len(tasks):
            count = settings.collection_batch_size or math.ceil(buffer.room / nodes_per_task)
            indices = range(position, min(position + count, len(tasks)))
            if hooks.on_batch is not None:
                hooks.on_batch(indices, steps)
            with gathered(*team.models):  # once for all turns
                levels = grow(
                    team,
                    scorer,
                    [tasks[order[index]] for index in indices],
                    settings.shape,
                    sampling=settings.sampling,
                    stream=(settings.seed, iteration, "rollout", epoch),
                    transition=transition,
                    tokens_per_batch=settings.tokens_per_batch,
                )
                collected = node_samples(
                    team,
                    levels,
                    settings.credit,
                    temperature=settings.sampling.temperature,
                    max_new_tokens=settings.sampling.max_new_tokens,
                    version=len(history),
                    reference=reference if settings.kl_coef else None,
                    batch_size=settings.micro_batch_size,
                )
            steps += collected.joint_responses
            if hooks.on_rollout is not None:
                hooks.on_rollout(collected.metrics, steps)
            for sample in collected.samples:
                buffer.add(sample)
                if not buffer.room:
                    update()
            position = indices.stop
            bar.update(len(indices))
        update()  # what is left
    return Learned(history, steps)


def steps_per_epoch(num_tasks: int, num_agents: int, settings: ReinforceSettings) -> int:
    """Optimizer steps of an epoch in which every tree grows to its full size."""
    branches = len(settings.shape.joint_indices(num_agents))
    turns = [turn for turn in range(settings.num_turns) for _ in range(branches**turn)] * num_tasks
    size, batch = settings.rollout_buffer_size, settings.train_batch_size or settings.rollout_buffer_size
    return sum(len(minibatches(turns[start : start + size], batch)) for start in range(0, len(turns), size))


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
        `learning_rate`, `advantage_std`, `frac_zero_std`, `turn`, `nodes`, `completions`, `dropped_completions`,
        `skipped` (1: some engine was not stepped), `nonfinite` (1: for a loss or gradient that is not finite); and
        what was not finite ("" if all was).
    """
    losses = [0.0] * len(models)
    trained = [False] * len(models)
    nonfinite = ""
    groups = agents_by_engine(engines)
    with scoring_mode(*models):
        for engine, agents in groups:
            for agent in agents:
                rows = _rows(samples, agent)
                size = micro_batch_size or max(1, len(rows))
                for start in range(0, len(rows), size):
                    # What the other processes do not take; fillers count for nothing.
                    own = [(*row[:2], row[2] * mine) for row, mine in even_share(rows[start : start + size])]
                    prompts, completions, weights = zip(*own, strict=True)
                    token_logprobs, mask = score_completions(
                        engine.model, prompts, completions, pad_id=pad_ids[agent], temperature=temperature
                    )
                    logprobs = sequence_logprobs(token_logprobs, mask)
                    loss = reinforce_loss(logprobs, torch.tensor(weights, dtype=torch.float64).to(logprobs)).sum()
                    losses[agent] += total(loss.item())
                    trained[agent] = True
                    if not math.isfinite(losses[agent]):
                        nonfinite = "loss"
                        break
                    engine.backward(loss)

    results: list[StepResult] = []
    for engine, agents in groups:
        if nonfinite == "loss" or not any(trained[agent] for agent in agents):
            engine.zero_grad()
            results.append(StepResult(math.nan if nonfinite == "loss" else 0.0, 0.0, skipped=True))
        else:
            results.append(engine.step())
            nonfinite = "gradient" if results[-1].skipped else nonfinite

    given = [a for sample in samples for of_agent in sample.advantages for a in of_agent]
    counted = torch.tensor([a for a in given if a is not None], dtype=torch.float64)
    alike = [zero for sample in samples for zero in sample.zero_std]
    metrics: Metrics = {"loss": sum(losses) / len(losses)}
    metrics |= {f"agent_{agent}/loss": loss for agent, loss in enumerate(losses)}
    for (_, agents), result in zip(groups, results, strict=True):
        metrics |= {f"agent_{agent}/grad_norm": result.grad_norm for agent in agents}
    return metrics | {
        "grad_norm": math.sqrt(sum(result.grad_norm**2 for result in results)),
        "learning_rate": max(result.learning_rate for result in results),
        "advantage_std": counted.std(correction=0).item() if len(counted) else 0.0,
        "frac_zero_std": sum(alike) / len(alike),
        "turn": samples[0].turn,
        "nodes": len(samples),
        "completions": len(counted),
        "dropped_completions": len(given) - len(counted),
        "skipped": int(any(result.skipped for result in results)),
        "nonfinite": int(bool(nonfinite)),
    }, nonfinite


def _rows(samples: Sequence[NodeSample], agent: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """(prompt, completion, weight) of the completions that move an agent, by length, which saves pads.

    A weight is the advantage over the number of completions of its node that count, and over the nodes.
    """
    rows = []
    for sample in samples:
        scale = 1.0 / (max(1, sample.counted(agent)) * len(samples))
        for completion, advantage in zip(sample.completions[agent], sample.advantages[agent], strict=True):
            if advantage and completion:
                rows.append((sample.prompts[agent], completion, advantage * scale))
    return sorted(rows, key=lambda row: len(row[0]) + len(row[1]))


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


def _refuse_nonfinite(what: str, history: Sequence[Metrics], on_nonfinite: str) -> None:
    in_a_row = next((n for n, m in enumerate(reversed(history)) if not m["nonfinite"]), len(history))
    last = history[-1]
    text = f"the {what} of epoch {last['epoch']}, optimizer step {last['step']} (turn {last['turn']}) is not finite"
    if in_a_row >= NONFINITE_LIMIT:
        raise TrainingError(
            f"{text}, nor were the {in_a_row - 1} before it: the policies diverge; lower the learning rate"
        )
    if on_nonfinite == "fail":
        raise TrainingError(f"{text}; on_nonfinite_loss: skip leaves such minibatches out and counts them")
