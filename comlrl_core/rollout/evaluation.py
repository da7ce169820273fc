"""Evaluation over several turns: one chain of joint responses per task and sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl_core.evaluation.evaluate import EvaluatedSample
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import Node, TreeShape, grow
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team


def evaluate_turns(
    team: Team,
    oracle: Oracle,
    tasks: Sequence[Mapping[str, Any]],
    *,
    num_turns: int,
    transition: Transition | None,
    sampling: Sampling,
    seed: int,
    side: str = "team",
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> list[list[EvaluatedSample]]:
    """Answer every task once over `num_turns` turns and score each turn: `[turn][task]`.

    No early stop: every turn is measured on all tasks (a task whose reward was dropped goes no further). The streams
    are those of `evaluation.evaluate`, continued over the turns: the first turn is what it samples, every policy is
    measured with the same random numbers, and no training stream moves.
    """
    turns: list[list[EvaluatedSample]] = [[] for _ in range(num_turns)]
    size = batch_size or max(len(tasks), 1)
    for start in range(0, len(tasks), size):
        batch = tasks[start : start + size]
        levels = grow(
            team,
            oracle,
            batch,
            TreeShape(num_generations=1, num_turns=num_turns),
            sampling=sampling,
            stream=(seed, "evaluate", side, "evaluate"),
            transition=transition,
            tokens_per_batch=tokens_per_batch,
        )
        for turn, nodes in zip(turns, levels, strict=False):
            turn += [_sample(node, str(batch[node.task]["task_id"])) for node in nodes]
    return turns


def _sample(node: Node, task_id: str) -> EvaluatedSample:
    answers = [answer for (answer,) in node.answers]
    return EvaluatedSample(
        task_id=task_id,
        sample=0,
        reward=None if node.scores[0].dropped else node.scores[0].processed,
        characters=tuple(len(answer.text) for answer in answers),
        tokens=tuple(len(answer.token_ids or ()) for answer in answers),
        finished=tuple(answer.finished for answer in answers),
        texts=tuple(answer.text for answer in answers),
    )
