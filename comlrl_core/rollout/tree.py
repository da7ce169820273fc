"""Rollout trees: every joint response of a node starts a branch, from which the next turn's node grows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from comlrl_core.engine.processes import by_first
from comlrl_core.errors import ConfigError
from comlrl_core.preference.candidates import Completion
from comlrl_core.preference.collection import completions
from comlrl_core.preference.scoring import oracle_prompt
from comlrl_core.randomness import stream_key
from comlrl_core.rewards.contract import Scored
from comlrl_core.rl.returns import CrossAggregation, cross_credit, tree_returns
from comlrl_core.rollout.transition import Transition
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team

JointMode = Literal["aligned", "cross"]
Texts = tuple[str, ...]
Path = tuple[int, ...]

# Beyond this a tree is a slip of the pen (K^N joint responses per node multiply over the turns), not a plan.
MOST_JOINT_RESPONSES_PER_TASK = 100_000


class Scorer(Protocol):
    """What scores joint responses: an `Oracle`, or a reward model behind the same method.

    `completions` is one list of B texts per agent; the answer has B entries.
    """

    def score(
        self,
        completions: Sequence[Sequence[str]],
        batch_items: Sequence[Mapping[str, Any]],
        prompts: Sequence[str | Sequence[str]],
    ) -> list[Scored]: ...


@dataclass(frozen=True)
class TreeShape:
    """How many completions an agent samples per node, how they combine, and how far a tree grows.

    `early_termination_threshold`: a node whose mean immediate reward is above it grows no branches (None: off).
    """

    num_generations: int
    num_turns: int = 1
    joint_mode: JointMode = "aligned"
    early_termination_threshold: float | None = None

    def joint_indices(self, num_agents: int) -> list[Path]:
        """Which completion of every agent makes up each joint response of a node, in the order of its branches."""
        if self.joint_mode == "aligned":
            return [(k,) * num_agents for k in range(self.num_generations)]
        return list(product(range(self.num_generations), repeat=num_agents))

    def nodes_per_task(self, num_agents: int) -> int:
        """Nodes of a fully grown tree. Raises `ConfigError` for a tree beyond all reason."""
        branches = self.num_generations ** (1 if self.joint_mode == "aligned" else num_agents)
        if branches * branches ** (self.num_turns - 1) > MOST_JOINT_RESPONSES_PER_TASK:
            raise ConfigError(
                f"num_generations {self.num_generations} with joint_mode {self.joint_mode}, {num_agents} agents and "
                f"num_turns {self.num_turns} makes {branches}^{self.num_turns} leaves per task, more than "
                f"{MOST_JOINT_RESPONSES_PER_TASK:,}; lower one of them"
            )
        return sum(branches**turn for turn in range(self.num_turns))


@dataclass(frozen=True)
class Node:
    """One point of a rollout at which every agent answered.

    Attributes:
        task: index of its task among those rolled out together.
        turn: from 1.
        path: the branches that lead to it; empty for the first turn.
        prompts: per agent the prompts seen so far, this node's own last.
        responses: per agent the responses so far, one less.
        answers: this node's completions, `[agent][k]`.
        scores: one per joint response, in the order of `TreeShape.joint_indices`.
        parent: `node * branches + branch` in the level above; 0 for the first turn.
    """

    task: int
    turn: int
    path: Path
    prompts: tuple[Texts, ...]
    responses: tuple[Texts, ...]
    answers: tuple[tuple[Completion, ...], ...]
    scores: tuple[Scored, ...]
    parent: int

    @property
    def own_prompts(self) -> Texts:
        """What every agent answered here."""
        return tuple(prompts[-1] for prompts in self.prompts)

    @property
    def rewards(self) -> list[float]:
        """Immediate rewards of the joint responses that were not dropped."""
        return [score.processed for score in self.scores if score.processed is not None]


@dataclass(frozen=True)
class _Seed:
    """A node before its agents have answered."""

    task: int
    path: Path
    prompts: tuple[Texts, ...]
    responses: tuple[Texts, ...]
    parent: int


def grow(
    team: Team,
    scorer: Scorer,
    tasks: Sequence[Mapping[str, Any]],
    shape: TreeShape,
    *,
    sampling: Sampling,
    stream: tuple[int | str, ...],
    transition: Transition | None = None,
    tokens_per_batch: int | None = None,
) -> list[list[Node]]:
    """Roll out one tree per task; `[turn][node]`, the nodes of a turn in the order of their tasks and branches.

    All nodes of a turn, over all tasks, are one `generate` call per agent and one call of the scorer. A sample's
    stream is named by `stream`, its task, its path, its agent and its number: what else is rolled out beside it does
    not matter. A dropped joint response grows no branch.

    Raises:
        ConfigError: several turns without a transition.
        TransitionError, RewardError, DataError: as the parts do.
    """
    if shape.num_turns > 1 and transition is None:
        raise ConfigError("external_transition is required when num_turns is above 1")
    joint = shape.joint_indices(team.num_agents)
    prompts = [team.prompts(task) for task in tasks]
    empty = ((),) * team.num_agents
    seeds = [_Seed(i, (), tuple((text,) for text in texts), empty, 0) for i, texts in enumerate(prompts)]
    levels: list[list[Node]] = []
    for turn in range(1, shape.num_turns + 1):
        if not seeds:
            break
        answers = _answer(team, tasks, seeds, shape, sampling, stream, tokens_per_batch)
        nodes = _score(scorer, tasks, seeds, answers, joint, turn)
        levels.append(nodes)
        if turn < shape.num_turns and transition is not None:
            seeds = _branch(team, tasks, nodes, joint, shape, transition)
    return levels


def level_tensors(levels: Sequence[Sequence[Node]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """`rewards`, `valid` and `parents` of each level, as `rl.returns.tree_returns` takes them (rewards in fp64)."""
    rewards = [
        torch.tensor([[s.processed or 0.0 for s in node.scores] for node in level], dtype=torch.float64)
        for level in levels
    ]
    valid = [torch.tensor([[not s.dropped for s in node.scores] for node in level]) for level in levels]
    parents = [torch.tensor([node.parent for node in level]) for level in levels]
    return rewards, valid, parents


def credits(
    levels: Sequence[Sequence[Node]],
    num_agents: int,
    joint_mode: JointMode,
    aggregation: CrossAggregation,
    discount: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """What every agent's completions are credited with.

    Returns:
        per level: branch returns `[n, B]` with their validity, and credits `[N, n, K]` with theirs; fp64.
    """
    returns, known = tree_returns(*level_tensors(levels), discount=discount)
    if joint_mode == "cross":
        pairs = [cross_credit(r, ok, num_agents, aggregation) for r, ok in zip(returns, known, strict=True)]
    else:  # the same return for every agent's k-th completion
        pairs = [
            (r.expand(num_agents, *r.shape), ok.expand(num_agents, *ok.shape))
            for r, ok in zip(returns, known, strict=True)
        ]
    return returns, known, [credit for credit, _ in pairs], [ok for _, ok in pairs]


def _answer(
    team: Team,
    tasks: Sequence[Mapping[str, Any]],
    seeds: Sequence[_Seed],
    shape: TreeShape,
    sampling: Sampling,
    stream: tuple[int | str, ...],
    tokens_per_batch: int | None,
) -> list[tuple[tuple[Completion, ...], ...]]:
    """`[node][agent][k]`."""
    names = [(*stream, str(tasks[seed.task]["task_id"]), *seed.path) for seed in seeds]
    generations = team.generate(
        [tuple(prompts[-1] for prompts in seed.prompts) for seed in seeds],
        shape.num_generations,
        sampling,
        lambda node, agent, k: stream_key(*names[node], agent, k),
        tokens_per_batch=tokens_per_batch,
    )
    return [tuple(zip(*(completions(team, joint) for joint in of_node), strict=True)) for of_node in generations]


def _score(
    scorer: Scorer,
    tasks: Sequence[Mapping[str, Any]],
    seeds: Sequence[_Seed],
    answers: Sequence[tuple[tuple[Completion, ...], ...]],
    joint: Sequence[Path],
    turn: int,
) -> list[Node]:
    texts: list[list[str]] = [[] for _ in answers[0]]
    items, prompts = [], []
    for seed, answer in zip(seeds, answers, strict=True):
        prompt = oracle_prompt([history[-1] for history in seed.prompts])
        for combination in joint:
            for agent, k in enumerate(combination):
                texts[agent].append(answer[agent][k].text)
            items.append(tasks[seed.task])
            prompts.append(prompt)
    scores = by_first(lambda: scorer.score(texts, items, prompts))
    size = len(joint)
    return [
        Node(
            seed.task, turn, seed.path, seed.prompts, seed.responses, answer,
            tuple(scores[index * size : (index + 1) * size]), seed.parent,
        )
        for index, (seed, answer) in enumerate(zip(seeds, answers, strict=True))
    ]  # fmt: skip


def _branch(
    team: Team,
    tasks: Sequence[Mapping[str, Any]],
    nodes: Sequence[Node],
    joint: Sequence[Path],
    shape: TreeShape,
    transition: Transition,
) -> list[_Seed]:
    """The nodes of the next turn: one for each branch that goes on."""
    seeds = []
    for index, node in enumerate(nodes):
        if _ends(node, shape.early_termination_threshold):
            continue
        for branch, combination in enumerate(joint):
            if node.scores[branch].dropped:
                continue
            own = [node.answers[agent][k].text for agent, k in enumerate(combination)]
            responses = tuple((*before, text) for before, text in zip(node.responses, own, strict=True))
            following = transition.next_prompts(team, tasks[node.task], node.prompts, responses)
            prompts = tuple((*before, text) for before, text in zip(node.prompts, following, strict=True))
            seeds.append(_Seed(node.task, (*node.path, branch), prompts, responses, index * len(joint) + branch))
    return seeds


def _ends(node: Node, threshold: float | None) -> bool:
    rewards = node.rewards
    return threshold is not None and bool(rewards) and math.fsum(rewards) / len(rewards) > threshold
