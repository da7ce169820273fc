"""Evaluate: the current policies answer held-out tasks and the task reward scores them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comlrl_core.engine.processes import by_first
from comlrl_core.errors import DataError
from comlrl_core.preference import fields
from comlrl_core.preference.candidates import JointResponse
from comlrl_core.preference.collection import answer
from comlrl_core.preference.scoring import oracle_prompt
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team


@dataclass(frozen=True)
class EvaluatedSample:
    """One joint answer to one held-out task.

    Attributes:
        reward: the task reward after `reward_processor`; None when the oracle's value was bad and dropped.
        characters, tokens: length of each agent's answer; `tokens` includes the end-of-sequence token.
        finished: whether each agent ended its answer itself.
        texts: each agent's answer.
    """

    task_id: str
    sample: int
    reward: float | None
    characters: tuple[int, ...]
    tokens: tuple[int, ...]
    finished: tuple[bool, ...]
    texts: tuple[str, ...]


def evaluate(
    team: Team,
    oracle: Oracle,
    tasks: Sequence[Mapping[str, Any]],
    *,
    samples_per_task: int,
    sampling: Sampling,
    seed: int,
    side: str = "team",
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> list[EvaluatedSample]:
    """Sample `samples_per_task` joint answers to every task and score them.

    The streams are named by seed, side, task, agent and sample alone: every policy of a run is measured with the same
    random numbers (which makes comparisons between them sharper), and no training stream moves.
    """
    evaluated: list[EvaluatedSample] = []
    size = batch_size or max(len(tasks), 1)
    for start in range(0, len(tasks), size):
        batch = tasks[start : start + size]
        prompts = [team.prompts(task) for task in batch]
        stream = (seed, "evaluate", side, "evaluate")
        answers = answer(team, side, prompts, batch, samples_per_task, sampling, stream, tokens_per_batch)
        evaluated.extend(_scored(oracle, batch, prompts, answers))
    return evaluated


def _scored(
    oracle: Oracle,
    tasks: Sequence[Mapping[str, Any]],
    prompts: Sequence[tuple[str, ...]],
    answers: Sequence[Sequence[JointResponse]],
) -> list[EvaluatedSample]:
    flat = [
        (task, prompt, joint)
        for task, prompt, of_task in zip(tasks, prompts, answers, strict=True)
        for joint in of_task
    ]
    texts = [list(texts) for texts in zip(*([c.text for c in joint.completions] for _, _, joint in flat), strict=True)]
    rows, asked = [dict(task) for task, _, _ in flat], [oracle_prompt(prompt) for _, prompt, _ in flat]
    scores = by_first(lambda: oracle.score(texts, rows, asked))
    return [
        EvaluatedSample(
            task_id=str(task["task_id"]),
            sample=joint.index,
            reward=None if score.dropped else score.processed,
            characters=tuple(len(c.text) for c in joint.completions),
            tokens=tuple(len(c.token_ids or ()) for c in joint.completions),
            finished=tuple(c.finished for c in joint.completions),
            texts=tuple(c.text for c in joint.completions),
        )
        for (task, _, joint), score in zip(flat, scores, strict=True)
    ]


def sample_to_json(sample: EvaluatedSample) -> dict[str, Any]:
    """A sample as plain data for a JSONL line."""
    return asdict(sample)


def sample_from_json(values: Mapping[str, Any], where: str = "sample") -> EvaluatedSample:
    """The sample that `sample_to_json` wrote. Raises `DataError` naming `where` and the field."""
    value = dict(values)
    fields.exact_keys(value, [field.name for field in dataclasses.fields(EvaluatedSample)], (), where)
    texts = fields.strings(value, "texts", where)
    for key, kind in (("characters", int), ("tokens", int), ("finished", bool)):
        if not isinstance(value[key], list) or any(type(item) is not kind for item in value[key]):
            raise DataError(f"{where}: field {key!r}: expected a list of {kind.__name__}, found {value[key]!r}")
        fields.per_agent(value[key], key, where, len(texts))
    return EvaluatedSample(
        task_id=fields.string(value, "task_id", where),
        sample=fields.integer(value, "sample", where, minimum=0),
        reward=fields.optional_number(value, "reward", where),
        characters=tuple(value["characters"]),
        tokens=tuple(value["tokens"]),
        finished=tuple(value["finished"]),
        texts=texts,
    )
