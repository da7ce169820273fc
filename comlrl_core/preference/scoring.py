"""Asking the oracle about every candidate, in batches, and summing up what it said."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from comlrl_core.engine.processes import by_first
from comlrl_core.preference.candidates import JointResponse, TaskCandidates
from comlrl_core.rewards.contract import Oracle, Scored


class ScoringResult(NamedTuple):
    """The candidates with their rewards, and how many were `scored` and how many of those `dropped`."""

    candidates: list[TaskCandidates]
    counts: dict[str, int]


def score_candidates(
    candidates: Sequence[TaskCandidates],
    oracle: Oracle,
    batch_size: int | None = None,
    on_progress: Callable[[int], Any] | None = None,
) -> ScoringResult:
    """Score both sides of every task; the given candidates stay as they are, rewards in them are ignored.

    Joint responses reach the oracle task by task, the team's side first, at most `batch_size` in one call
    (None: all at once). `batch_items` is the row of the task; `prompts` is its prompt, a string where all
    agents have the same, else a list with one per agent. `on_progress(n)` is called after each call of the
    oracle with the n responses that it scored. Raises `RewardError` as the oracle does.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    queue = [(task, response) for task in candidates for response in task.responses]
    scores: list[Scored] = []
    size = batch_size or max(len(queue), 1)
    for start in range(0, len(queue), size):
        chunk = queue[start : start + size]
        texts = [[response.completions[agent].text for _, response in chunk] for agent in range(oracle.num_agents)]
        rows = [{**task.row, "task_id": task.task_id} for task, _ in chunk]
        scores += by_first(partial(oracle.score, texts, rows, [oracle_prompt(task.prompts) for task, _ in chunk]))
        if on_progress is not None:
            on_progress(len(chunk))
    answers = iter(scores)

    def scored(side: list[JointResponse]) -> list[JointResponse]:
        return [_with_score(response, next(answers)) for response in side]

    # The order of the queue: task by task, current before comparator.
    result = []
    for task in candidates:
        current = scored(task.current)
        comparator = None if task.comparator is None else scored(task.comparator)
        result.append(replace(task, current=current, comparator=comparator))
    counts = {"scored": len(scores), "dropped": sum(score.dropped for score in scores)}
    return ScoringResult(result, counts)


def oracle_prompt(prompts: Sequence[str]) -> str | list[str]:
    """A task's prompt as a reward function sees it: the text if all agents share it, else one per agent."""
    return prompts[0] if len(set(prompts)) == 1 else list(prompts)


def reward_distribution(responses: Sequence[JointResponse]) -> dict[str, float | int] | None:
    """Count, mean, population standard deviation, minimum, quartiles and maximum of the processed rewards.

    Dropped responses are left out; None if nothing is left.
    """
    rewards = sorted(response.reward for response in responses if response.reward is not None)
    if not rewards:
        return None
    first, median, third = statistics.quantiles(rewards, n=4, method="inclusive") if len(rewards) > 1 else rewards * 3
    return {
        "count": len(rewards),
        "mean": statistics.fmean(rewards),
        "std": statistics.pstdev(rewards),
        "min": rewards[0],
        "first_quartile": first,
        "median": median,
        "third_quartile": third,
        "max": rewards[-1],
    }


def _with_score(response: JointResponse, score: Scored) -> JointResponse:
    return replace(response, raw_reward=score.raw, reward=score.processed, dropped=score.dropped)
