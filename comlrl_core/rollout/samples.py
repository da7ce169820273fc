"""From rollout trees to samples: credits, the penalty for leaving the reference, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic

import torch
from torch import Tensor, nn

from comlrl_core.engine.processes import put_together, share
from comlrl_core.engine.weights import gathered
from comlrl_core.preference.candidates import Completion
from comlrl_core.rl.advantages import AdvantageMode, group_advantages, zero_variance
from comlrl_core.rl.kl import sequence_kl
from comlrl_core.rl.returns import CrossAggregation
from comlrl_core.rollout.buffer import Ids, NodeSample, Sample
from comlrl_core.rollout.tree import JointMode, Node, credits
from comlrl_core.team.scoring import score_completions, scoring_mode
from comlrl_core.team.team import Team


@dataclass(frozen=True)
class Credit:
    """How returns become advantages.

    `kl_coef` weighs the sampled divergence from the reference in each agent's own return, before baseline and
    normalisation; it never passes to a node above.
    """

    advantage_mode: AdvantageMode = "mean"
    advantage_normalization: bool = True
    joint_mode: JointMode = "aligned"
    cross_aggregation: CrossAggregation = "sum"
    tree_discount: float = 1.0
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Collected(Generic[Sample]):
    """Samples of some rollouts, task by task and turn by turn; what was measured; joint responses that were scored.

    A node of which every joint response was dropped gives no sample.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    joint_responses: int


def node_samples(
    team: Team,
    levels: Sequence[Sequence[Node]],
    credit: Credit,
    *,
    temperature: float,
    max_new_tokens: int,
    version: int = 0,
    reference: Team | None = None,
    batch_size: int | None = None,
) -> Collected[NodeSample]:
    """The advantages of every agent's completions at every node of `levels` (from `rollout.tree.grow`).

    Args:
        team: the policies that sampled the rollouts, not updated since.
        temperature: of the sampler; log-probabilities for the divergence are scored at it.
        max_new_tokens: of the sampler; prompts are cut to leave room for it, as when sampling.
        version: optimizer steps that the team has made.
        reference: frozen policies to stay close to, or None.
        batch_size: completions per forward pass of the divergence; None: all of a turn.

    Returns:
        samples and metrics: per turn `turn_t/reward_mean` (processed), `turn_t/raw_reward_mean`,
        `turn_t/expected_return` (without the penalty), `turn_t/nodes`, `turn_t/joint_responses`; over all turns
        `dropped`, `frac_zero_std` (share of groups without a difference), `agent_i/tokens`, `agent_i/finished` and,
        with a reference, `kl/agent_i` (nats per completion).
    """
    agents = range(team.num_agents)
    metrics: dict[str, float] = {"dropped": float(sum(s.dropped for level in levels for n in level for s in n.scores))}
    divergences: list[list[Tensor]] = [[] for _ in agents]
    zeros: list[bool] = []
    ordered: list[tuple[int, int, NodeSample]] = []
    returns, known, credited, counted = credits(
        levels, team.num_agents, credit.joint_mode, credit.cross_aggregation, credit.tree_discount
    )
    for depth, level in enumerate(levels):
        metrics |= turn_metrics(level, returns[depth], known[depth])
        prompts = prompt_ids(team, level, max_new_tokens)
        advantages, alike = [], []
        for agent in agents:
            own, valid = credited[depth][agent], counted[depth][agent]
            if reference is not None:
                found = divergence(
                    team, reference, agent, prompts[agent], [node.answers[agent] for node in level], temperature,
                    batch_size,
                )  # fmt: skip
                divergences[agent].append(found.flatten())
                own = own - credit.kl_coef * found
            advantages.append(group_advantages(own, valid, credit.advantage_mode, credit.advantage_normalization))
            alike.append(zero_variance(own, valid))
        for index, node in enumerate(level):
            if not bool(counted[depth][:, index].any()):
                continue
            sample = NodeSample(
                turn=node.turn,
                version=version,
                prompts=tuple(prompts[agent][index] for agent in agents),
                completions=tuple(tuple(token_ids(one) for one in node.answers[agent]) for agent in agents),
                advantages=tuple(
                    tuple(
                        value if ok else None
                        for value, ok in zip(
                            advantages[agent][index].tolist(), counted[depth][agent][index].tolist(), strict=True
                        )
                    )
                    for agent in agents
                ),
                zero_std=tuple(bool(alike[agent][index]) for agent in agents),
            )
            zeros += sample.zero_std
            ordered.append((node.task, node.turn, sample))
    metrics |= answer_metrics(levels, team.num_agents)
    if reference is not None:
        metrics |= {f"kl/agent_{agent + 1}": torch.cat(divergences[agent]).mean().item() for agent in agents}
    if zeros:
        metrics["frac_zero_std"] = fmean(zeros)
    ordered.sort(key=lambda entry: entry[:2])  # stable: nodes of a turn stay in the order of their branches
    joint_responses = sum(len(node.scores) for level in levels for node in level)
    return Collected([sample for _, _, sample in ordered], metrics, joint_responses)


def prompt_ids(team: Team, level: Sequence[Node], max_new_tokens: int) -> list[list[Ids]]:
    """`[agent][node]` ids of the prompts that the nodes of a level answered, cut as they were then."""
    truncated = team.truncated_prompts
    found = [
        [
            tuple(team.encode(node.own_prompts[agent], agent, max_new_tokens, f"number {node.task} of the batch"))
            for node in level
        ]
        for agent in range(team.num_agents)
    ]
    team.truncated_prompts = truncated  # they were counted when they were answered
    return found


def answer_metrics(levels: Sequence[Sequence[Node]], num_agents: int) -> dict[str, float]:
    """Mean length of every agent's answers and the share of those that ended by themselves."""
    metrics = {}
    for agent in range(num_agents):
        answers = [answer for level in levels for node in level for answer in node.answers[agent]]
        metrics[f"agent_{agent + 1}/tokens"] = fmean(len(token_ids(answer)) for answer in answers)
        metrics[f"agent_{agent + 1}/finished"] = fmean(answer.finished for answer in answers)
    return metrics


def turn_metrics(level: Sequence[Node], returns: Tensor, known: Tensor) -> dict[str, float]:
    """What is reported of a turn's nodes; `returns` and `known` of their branches, `[n, B]`."""
    turn = f"turn_{level[0].turn}"
    rewards = [reward for node in level for reward in node.rewards]
    raw = [score.raw for node in level for score in node.scores if score.raw is not None]
    metrics = {f"{turn}/nodes": float(len(level)), f"{turn}/joint_responses": float(returns.numel())}
    if rewards:
        metrics[f"{turn}/reward_mean"] = fmean(rewards)
    if raw:
        metrics[f"{turn}/raw_reward_mean"] = fmean(raw)
    if bool(known.any()):
        metrics[f"{turn}/expected_return"] = returns[known].mean().item()
    return metrics


@torch.no_grad()
def divergence(
    team: Team,
    reference: Team,
    agent: int,
    prompts: Sequence[Ids],
    answers: Sequence[Sequence[Completion]],
    temperature: float,
    batch_size: int | None,
) -> Tensor:
    """Sampled divergence of an agent's completions from the reference's policy, fp64 `[n, K]` on the CPU."""
    rows = [(prompt, token_ids(answer)) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    everything = sorted(range(len(rows)), key=lambda index: len(rows[index][0]) + len(rows[index][1]))
    by_length = share(everything)
    result = torch.empty(len(rows), dtype=torch.float64)
    size = batch_size or len(rows)

    def score(model: nn.Module, indices: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor]:
        found, mask = score_completions(
            model, [rows[i][0] for i in indices], [rows[i][1] for i in indices], pad_id=pad_id, temperature=temperature
        )
        return found.double().cpu(), mask.cpu()

    models = team.models[agent], reference.models[agent]
    with gathered(*models), scoring_mode(*models):
        for start in range(0, len(by_length), size):
            indices = by_length[start : start + size]
            # The same batch for both: equal weights then give equal numbers to the last bit, and a divergence of 0.
            (own, mask), (other, _) = (score(model, indices, team.pad_ids[agent]) for model in models)
            result[indices] = sequence_kl(own, other, mask)
    found = put_together(result[by_length].tolist(), len(rows))
    result[everything] = torch.tensor(found, dtype=torch.float64)
    return result.view(len(prompts), -1)


def token_ids(answer: Completion) -> Ids:
    """The sampled ids of an answer."""
    assert answer.token_ids is not None  # sampled here, never text alone
    return answer.token_ids
