"""Collect: both sides answer the tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl_core.comparators.base import Comparator
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.randomness import stream_key
from comlrl_core.team.generation import Generation, Sampling
from comlrl_core.team.team import Team


def collect(
    team: Team,
    comparator: Comparator | None,
    tasks: Sequence[Mapping[str, Any]],
    *,
    num_candidates: int,
    comparator_num_candidates: int | None = None,
    sampling: Sampling,
    seed: int,
    iteration: int,
    tokens_per_batch: int | None = None,
) -> list[TaskCandidates]:
    """Let the team, and the comparator where there is one, answer every task.

    Each agent generates once per side for all `tasks` together, so a caller that wants smaller batches passes
    fewer tasks at a time; which tasks share a call does not change what is sampled (up to rounding).

    Returns:
        one `TaskCandidates` per task, in order: `num_candidates` joint responses of the team and, with a comparator,
        `comparator_num_candidates` (default: as many) of the other side.
    """
    prompts = [team.prompts(task) for task in tasks]
    own = answer(
        team,
        "current",
        prompts,
        tasks,
        num_candidates,
        sampling,
        (seed, iteration, "collect"),
        tokens_per_batch,
    )
    other: list[list[JointResponse]] | list[None] = [None] * len(tasks)
    if comparator is not None:
        if comparator.team is None:
            raise ValueError("the comparator has been released")
        other = answer(
            comparator.team,
            comparator.policy,
            [comparator.team.prompts(task) for task in tasks],
            tasks,
            comparator_num_candidates or num_candidates,
            sampling,
            (seed, iteration, "compare"),
            tokens_per_batch,
        )
    return [
        TaskCandidates(task_id=str(task["task_id"]), row=dict(task), prompts=prompt, current=mine, comparator=theirs)
        for task, prompt, mine, theirs in zip(tasks, prompts, own, other, strict=True)
    ]


def answer(
    team: Team,
    source: str,
    prompts: Sequence[tuple[str, ...]],
    tasks: Sequence[Mapping[str, Any]],
    num_candidates: int,
    sampling: Sampling,
    stream: tuple[int | str, ...],
    tokens_per_batch: int | None = None,
) -> list[list[JointResponse]]:
    """`num_candidates` joint responses of `team` to every task, sampled from streams below `stream`."""
    task_ids = [str(task["task_id"]) for task in tasks]
    generations = team.generate(
        prompts,
        num_candidates,
        sampling,
        lambda task, agent, candidate: stream_key(*stream, task_ids[task], agent, candidate),
        tokens_per_batch=tokens_per_batch,
        progress=f"{stream[-1]}: answers",
    )
    return [
        [
            JointResponse(index=index, source=source, completions=completions(team, joint))
            for index, joint in enumerate(of_task)
        ]
        for of_task in generations
    ]


def completions(team: Team, joint: Sequence[Generation]) -> tuple[Completion, ...]:
    """A joint response as records keep it: text for people and oracles, token ids for training."""
    return tuple(
        Completion(
            text=agent.decode(generation.token_ids),
            token_ids=tuple(generation.token_ids),
            finished=generation.finished,
        )
        for agent, generation in zip(team.agents, joint, strict=True)
    )
