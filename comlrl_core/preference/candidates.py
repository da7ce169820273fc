"""Candidates: what the team and its comparator answered to each task, before and after the oracle saw it.

One JSONL line per task. A file of candidates is what the collect stage hands to the score stage, and that to
pairing.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_core.errors import DataError
from comlrl_core.files import iter_jsonl, write_jsonl
from comlrl_core.preference import fields

CURRENT = "current"


@dataclass(frozen=True)
class Completion:
    """One agent's answer.

    `token_ids` are the sampled ids, the ending EOS included, or None where only text exists (an API's
    answer). `finished` means that the answer ended by itself, not by the token limit.
    """

    text: str
    token_ids: tuple[int, ...] | None
    finished: bool


@dataclass(frozen=True)
class JointResponse:
    """Every agent's answer to one task, and what the oracle said about them together.

    `index` is the candidate's number on its side (a side may have gaps); `source` is `current` for the team
    in training, else the comparator's policy. Rewards are None until scored; `dropped` means that the
    oracle's reward was unusable.
    """

    index: int
    source: str
    completions: tuple[Completion, ...]
    raw_reward: float | None = None
    reward: float | None = None
    dropped: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The joint text, one per agent."""
        return tuple(completion.text for completion in self.completions)


@dataclass(frozen=True)
class TaskCandidates:
    """One task, its rendered prompts (one per agent) and both sides' candidates (or the team's alone)."""

    task_id: str
    row: Mapping[str, Any]
    prompts: tuple[str, ...]
    current: list[JointResponse]
    comparator: list[JointResponse] | None = None

    @property
    def responses(self) -> list[JointResponse]:
        """Both sides' joint responses, the team's first."""
        return [*self.current, *(self.comparator or [])]


def write_candidates(path: str | os.PathLike[str], candidates: Iterable[TaskCandidates]) -> Path:
    """Write one line per task, atomically and always with the same bytes for the same candidates."""
    write_jsonl(path, map(_task_to_json, candidates))
    return Path(path)


def read_candidates(path: str | os.PathLike[str]) -> list[TaskCandidates]:
    """The tasks of a candidates file. Raises `DataError` naming file, line and field."""
    tasks: list[TaskCandidates] = []
    seen: dict[str, int] = {}
    for number, value in iter_jsonl(path):
        task = _task_from_json(value, f"{path}: line {number}")
        if task.task_id in seen:
            raise DataError(f"{path}: line {number}: task {task.task_id!r} is on line {seen[task.task_id]} already")
        seen[task.task_id] = number
        tasks.append(task)
    return tasks


def _task_to_json(task: TaskCandidates) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "row": dict(task.row),
        "prompts": list(task.prompts),
        "current": [_response_to_json(response) for response in task.current],
        "comparator": None if task.comparator is None else [_response_to_json(r) for r in task.comparator],
    }


def _response_to_json(response: JointResponse) -> dict[str, Any]:
    return {
        "index": response.index,
        "source": response.source,
        "completions": [
            {
                "text": completion.text,
                "token_ids": None if completion.token_ids is None else list(completion.token_ids),
                "finished": completion.finished,
            }
            for completion in response.completions
        ],
        "raw_reward": response.raw_reward,
        "reward": response.reward,
        "dropped": response.dropped,
    }


def _task_from_json(value: dict[str, Any], where: str) -> TaskCandidates:
    fields.exact_keys(value, ("task_id", "row", "prompts", "current", "comparator"), (), where)
    prompts = fields.strings(value, "prompts", where)
    if not isinstance(value["row"], dict):
        raise DataError(f"{where}: field 'row': expected an object, found {fields.shown(value['row'])}")
    comparator = value["comparator"]
    return TaskCandidates(
        task_id=fields.string(value, "task_id", where),
        row=value["row"],
        prompts=prompts,
        current=_side(value["current"], len(prompts), f"{where}: field 'current'"),
        comparator=None if comparator is None else _side(comparator, len(prompts), f"{where}: field 'comparator'"),
    )


def _side(value: Any, num_agents: int, where: str) -> list[JointResponse]:
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list, found {fields.shown(value)}")
    side = [_response_from_json(item, num_agents, f"{where}[{i}]") for i, item in enumerate(value)]
    indices = [response.index for response in side]
    if len(set(indices)) < len(indices):
        raise DataError(f"{where}: two candidates have the same index")
    return side


def _response_from_json(value: Any, num_agents: int, where: str) -> JointResponse:
    keys = ("index", "source", "completions", "raw_reward", "reward", "dropped")
    fields.exact_keys(value, keys, (), where)
    completions = value["completions"]
    if not isinstance(completions, list) or len(completions) != num_agents:
        raise DataError(f"{where}: field 'completions': expected a list of {num_agents}, one per agent")
    dropped = fields.boolean(value, "dropped", where)
    reward = fields.optional_number(value, "reward", where)
    if dropped and reward is not None:
        raise DataError(f"{where}: field 'reward': a dropped candidate has none")
    return JointResponse(
        index=fields.integer(value, "index", where, minimum=0),
        source=fields.string(value, "source", where),
        completions=tuple(_completion(item, f"{where}: completion {i}") for i, item in enumerate(completions)),
        raw_reward=fields.optional_number(value, "raw_reward", where),
        reward=reward,
        dropped=dropped,
    )


def _completion(value: Any, where: str) -> Completion:
    fields.exact_keys(value, ("text", "token_ids", "finished"), (), where)
    return Completion(
        text=fields.string(value, "text", where, empty=True),
        token_ids=None if value["token_ids"] is None else fields.token_ids(value["token_ids"], where, "token_ids"),
        finished=fields.boolean(value, "finished", where),
    )
