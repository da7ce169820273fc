"""From rollouts to what actors and critics learn: temporal-difference targets, and advantages from a critic.

An episode is a rollout without branches: one joint response per turn (or K of them in its only turn). Values are asked
once, for the policies that sampled, and stay fixed over the updates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from comlrl_core.critics.critic import View
from comlrl_core.critics.critics import Critics, CriticType
from comlrl_core.critics.encoding import History
from comlrl_core.preference.collection import completions
from comlrl_core.randomness import stream_key
from comlrl_core.rl.returns import tree_returns
from comlrl_core.rl.values import explained_variance, mean_of_others, td_targets
from comlrl_core.rollout.buffer import Ids, NodeSample
from comlrl_core.rollout.samples import Collected, answer_metrics, divergence, prompt_ids, token_ids, turn_metrics
from comlrl_core.rollout.tree import Node, level_tensors
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team

Answer = tuple[str, Ids]  # a response as text and as ids
Inputs = list[list[list[Ids]]]  # [level][node][candidate]; one candidate stands for the history in V(h)


@dataclass(frozen=True)
class TemporalDifference:
    """How rewards become targets and advantages.

    Attributes:
        critic_type: `v`, what a history is worth, or `q`, what a response to it is worth.
        discount: weight of the turn that follows.
        kl_coef: weighs the sampled divergence from the reference: a critic of one agent learns the reward without it,
            a central critic the team's reward, and the agent's advantage loses it.
        q_baseline_samples: joint responses sampled for a baseline of Q where a node has one candidate.
    """

    critic_type: CriticType = "v"
    discount: float = 1.0
    kl_coef: float = 0.0
    q_baseline_samples: int = 4


@dataclass(frozen=True)
class Lesson:
    """What a node teaches one critic: inputs, the value that each had at collection, and the targets of each."""

    inputs: tuple[Ids, ...]
    old_values: tuple[float, ...]
    targets: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class EpisodeSample(NodeSample):
    """A node's samples for all actors (`advantages` not normalised), and its lesson for every critic."""

    lessons: tuple[Lesson, ...]


def episode_samples(
    team: Team,
    critics: Critics,
    tasks: Sequence[Mapping[str, Any]],
    levels: Sequence[Sequence[Node]],
    rule: TemporalDifference,
    *,
    sampling: Sampling,
    stream: tuple[int | str, ...],
    version: int = 0,
    reference: Team | None = None,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> Collected[EpisodeSample]:
    """Ask the critics about every node of `levels` (from `rollout.tree.grow`), and say what follows for everybody.

    Args:
        team: the policies that sampled the rollouts, not updated since.
        tasks, sampling, stream: those of the rollouts; the baseline's responses have streams of their own.
        version: optimizer steps that the team has made.
        reference: frozen policies to stay close to, or None.
        batch_size: completions per forward pass of the divergence; None: all of a turn.
        tokens_per_batch: most tokens in one forward pass of a critic or in one generation batch.

    Returns:
        samples and metrics: as `rollout.samples.node_samples` (but for `frac_zero_std`), and `critic/value_mean`,
        `critic/target_mean`, `critic/explained_variance` (mean over critics; left out where targets do not vary),
        `critic/advantage_mean` and `critic/advantage_std` (before any normalisation), `critic/at_length_limit` (share
        of inputs as long as the critic reads).
    """
    agents = range(team.num_agents)
    metrics: dict[str, float] = {"dropped": float(sum(s.dropped for level in levels for n in level for s in n.scores))}
    returns, known = tree_returns(*level_tensors(levels), discount=rule.discount)
    for depth, level in enumerate(levels):
        metrics |= turn_metrics(level, returns[depth], known[depth])
    metrics |= answer_metrics(levels, team.num_agents)
    prompts = [prompt_ids(team, level, sampling.max_new_tokens) for level in levels]
    penalties = _penalties(team, reference, levels, prompts, rule, sampling, batch_size, metrics)
    inputs, values = _values(critics, levels, prompts, rule.critic_type, tokens_per_batch)
    rewards, valid, parents = level_tensors(levels)

    targets: list[list[Tensor]] = []  # [critic][level], [n, K]
    for index in range(len(critics.critics)):
        own = [r if critics.central else r - p[index] for r, p in zip(rewards, penalties, strict=True)]
        targets.append(_targets(own, values[index], parents, rule.discount))
    metrics |= _critic_metrics(critics, inputs, values, targets, valid)

    if rule.critic_type == "q":
        baselines = _baselines(
            team, critics, tasks, levels, prompts, values, valid, rule, sampling, stream, tokens_per_batch
        )
    ordered: list[tuple[int, int, EpisodeSample]] = []
    for depth, level in enumerate(levels):
        advantages = []
        for agent in agents:
            index = critics.index_of(agent)
            worth = values[index][depth]
            advantage = targets[index][depth] - worth if rule.critic_type == "v" else worth - baselines[index][depth]
            advantages.append(advantage - penalties[depth][agent] if critics.central else advantage)
        for number, node in enumerate(level):
            counts = valid[depth][number].tolist()
            if any(counts):
                ordered.append((
                    node.task,
                    node.turn,
                    EpisodeSample(
                        turn=node.turn,
                        version=version,
                        prompts=tuple(prompts[depth][agent][number] for agent in agents),
                        completions=tuple(tuple(token_ids(one) for one in node.answers[agent]) for agent in agents),
                        advantages=tuple(
                            tuple(a if ok else None for a, ok in zip(of_agent[number].tolist(), counts, strict=True))
                            for of_agent in advantages
                        ),
                        zero_std=(False,) * team.num_agents,
                        lessons=tuple(
                            _lesson(of_inputs[depth][number], old[depth][number], aims[depth][number], counts)
                            for of_inputs, old, aims in zip(inputs, values, targets, strict=True)
                        ),
                    ),
                ))  # fmt: skip
    ordered.sort(key=lambda entry: entry[:2])
    given = [a for _, _, sample in ordered for of_agent in sample.advantages for a in of_agent if a is not None]
    if given:
        metrics |= {"critic/advantage_mean": fmean(given), "critic/advantage_std": pstdev(given)}
    joint_responses = sum(len(node.scores) for level in levels for node in level)
    return Collected([sample for _, _, sample in ordered], metrics, joint_responses)


def _penalties(
    team: Team,
    reference: Team | None,
    levels: Sequence[Sequence[Node]],
    prompts: Sequence[Sequence[Sequence[Ids]]],
    rule: TemporalDifference,
    sampling: Sampling,
    batch_size: int | None,
    metrics: dict[str, float],
) -> list[Tensor]:
    """What the divergence from the reference costs, per level `[N, n, K]`; 0 without one."""
    found: list[Tensor] = []
    for level, of_level in zip(levels, prompts, strict=True):
        shape = (team.num_agents, len(level), len(level[0].scores))
        if reference is None or not rule.kl_coef:
            found.append(torch.zeros(shape, dtype=torch.float64))
            continue
        of_agents = [
            divergence(
                team, reference, agent, of_level[agent], [node.answers[agent] for node in level],
                sampling.temperature, batch_size,
            )
            for agent in range(team.num_agents)
        ]  # fmt: skip
        found.append(torch.stack(of_agents))
    if reference is not None and rule.kl_coef:
        for agent in range(team.num_agents):
            metrics[f"kl/agent_{agent + 1}"] = torch.cat([level[agent].flatten() for level in found]).mean().item()
        found = [rule.kl_coef * level for level in found]
    return found


def _values(
    critics: Critics,
    levels: Sequence[Sequence[Node]],
    prompts: Sequence[Sequence[Sequence[Ids]]],
    critic_type: CriticType,
    tokens_per_batch: int | None,
) -> tuple[list[Inputs], list[list[Tensor]]]:
    """Every critic's inputs, and its values per level: `[n, 1]` for V(h), `[n, K]` for Q(h, a); fp64."""
    inputs: list[Inputs] = []
    values: list[list[Tensor]] = []
    for index, critic in enumerate(critics.critics):
        entries = [
            [_view(node, agent, prompts[depth][agent][number], answers[agent]) for agent in critics.sees(index)]
            for depth, level in enumerate(levels)
            for number, node in enumerate(level)
            for answers in _candidates(node, critic_type)
        ]
        encoded = critic.encode(entries)
        found = iter(critic.values(encoded, tokens_per_batch))
        sequences = iter(encoded)
        sizes = [len(_candidates(level[0], critic_type)) for level in levels]
        shaped = [[[next(sequences) for _ in range(k)] for _ in level] for level, k in zip(levels, sizes, strict=True)]
        inputs.append(shaped)
        values.append(
            [torch.tensor([[next(found) for _ in node] for node in level], dtype=torch.float64) for level in shaped]
        )
    return inputs, values


def _candidates(node: Node, critic_type: CriticType) -> list[tuple[Answer | None, ...]]:
    """`[k][agent]`: the responses that a critic is asked about; for V(h) once, without any."""
    if critic_type == "v":
        return [(None,) * len(node.answers)]
    return [tuple((one.text, token_ids(one)) for one in joint) for joint in zip(*node.answers, strict=True)]


def _view(node: Node, agent: int, prompt: Ids, answer: Answer | None) -> View:
    said = node.responses[agent]
    if answer is None:
        return View(History(node.prompts[agent], said), prompt)
    return View(History(node.prompts[agent], (*said, answer[0])), prompt, answer[1])


def _targets(
    rewards: Sequence[Tensor], values: Sequence[Tensor], parents: Sequence[Tensor], discount: float
) -> list[Tensor]:
    """Targets per level, `[n, K]`."""
    found = []
    for depth, reward in enumerate(rewards):
        following, goes_on = torch.zeros_like(reward).flatten(), torch.zeros(reward.numel(), dtype=torch.bool)
        if depth + 1 < len(rewards):
            # Several turns have one candidate each: a node's first value is its only one.
            following[parents[depth + 1]] = values[depth + 1][:, 0]
            goes_on[parents[depth + 1]] = True
        found.append(td_targets(reward.flatten(), following, goes_on, discount).view(reward.shape))
    return found


def _baselines(
    team: Team,
    critics: Critics,
    tasks: Sequence[Mapping[str, Any]],
    levels: Sequence[Sequence[Node]],
    prompts: Sequence[Sequence[Sequence[Ids]]],
    values: Sequence[Sequence[Tensor]],
    valid: Sequence[Tensor],
    rule: TemporalDifference,
    sampling: Sampling,
    stream: tuple[int | str, ...],
    tokens_per_batch: int | None,
) -> list[list[Tensor]]:
    """What other responses to the same history are worth, `[critic][level]`, `[n, K]`.

    The mean of the node's other candidates; where a node has one candidate, of `q_baseline_samples` joint responses
    that are sampled for this. A candidate whose others were all dropped is compared with itself: nothing is known.
    """
    if len(levels[0][0].scores) > 1:
        found = []
        for of_critic in values:
            alone = [ok.sum(dim=1, keepdim=True) < 2 for ok in valid]
            found.append(
                [
                    torch.where(lone, worth, mean_of_others(worth, ok))
                    for worth, ok, lone in zip(of_critic, valid, alone, strict=True)
                ]
            )
        return found
    nodes = [(depth, number, node) for depth, level in enumerate(levels) for number, node in enumerate(level)]
    names = [(*stream, "baseline", str(tasks[node.task]["task_id"]), *node.path) for _, _, node in nodes]
    generations = team.generate(
        [node.own_prompts for _, _, node in nodes],
        rule.q_baseline_samples,
        sampling,
        lambda node, agent, k: stream_key(*names[node], agent, k),
        tokens_per_batch=tokens_per_batch,
    )
    answers = [[completions(team, joint) for joint in of_node] for of_node in generations]
    found = []
    for index, critic in enumerate(critics.critics):
        entries = [
            [
                _view(node, agent, prompts[depth][agent][number], (joint[agent].text, token_ids(joint[agent])))
                for agent in critics.sees(index)
            ]
            for (depth, number, node), of_node in zip(nodes, answers, strict=True)
            for joint in of_node
        ]
        worth = torch.tensor(critic.values(critic.encode(entries), tokens_per_batch), dtype=torch.float64)
        means = worth.view(len(nodes), -1).mean(dim=1, keepdim=True)
        found.append(list(means.split([len(level) for level in levels])))
    return found


def _lesson(inputs: Sequence[Ids], values: Tensor, targets: Tensor, counts: Sequence[bool]) -> Lesson:
    kept = [target for target, ok in zip(targets.tolist(), counts, strict=True) if ok]
    if len(inputs) == 1:  # V(h), or one candidate
        return Lesson(tuple(inputs), tuple(values.tolist()), (tuple(kept),))
    chosen = [k for k, ok in enumerate(counts) if ok]
    return Lesson(
        tuple(inputs[k] for k in chosen),
        tuple(values[k].item() for k in chosen),
        tuple((target,) for target in kept),
    )


def _critic_metrics(
    critics: Critics,
    inputs: Sequence[Inputs],
    values: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    valid: Sequence[Tensor],
) -> dict[str, float]:
    counted = torch.cat([ok.flatten() for ok in valid])
    if not bool(counted.any()):
        return {}
    explained, worths, aims = [], [], []
    for of_critic, aim in zip(values, targets, strict=True):
        worth = torch.cat([v.expand_as(t).flatten() for v, t in zip(of_critic, aim, strict=True)])[counted]
        goal = torch.cat([t.flatten() for t in aim])[counted]
        explained.append(explained_variance(worth, goal))
        worths.append(worth.mean().item())
        aims.append(goal.mean().item())
    metrics = {"critic/value_mean": fmean(worths), "critic/target_mean": fmean(aims)}
    if all(map(math.isfinite, explained)):
        metrics["critic/explained_variance"] = fmean(explained)
    at_limit = [
        len(ids) == critic.max_length
        for critic, of_critic in zip(critics.critics, inputs, strict=True)
        for level in of_critic
        for node in level
        for ids in node
    ]
    return metrics | {"critic/at_length_limit": fmean(at_limit)}
