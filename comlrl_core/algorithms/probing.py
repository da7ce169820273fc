"""Probing: does the task reward follow the reward model that the policies learn from?

The team answers some tasks before and after an update, and both rewards score the answers. The random streams are the
probe's own: probing more or less changes no weight.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.algorithms.shared import sampling
from comlrl_core.evaluation import EvaluatedSample, evaluate
from comlrl_core.preference.reward_model import (
    JointRewardModel,
    JointText,
    ProbeSample,
    exploitation_warning,
    probe_metrics,
)
from comlrl_core.preference.reward_model.diagnostics import changes, is_held_out
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.team import Team

Config = MARLHFConfig | MARLHFIterConfig
Tasks = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeTasks:
    """The tasks that the probes answer, and how often each."""

    tasks: Tasks
    samples_per_task: int


def probe_tasks(config: Config, tasks: Tasks) -> ProbeTasks | None:
    """About `reward_probe_samples` answers on tasks that the reward model was not fitted to; None without probes.

    Where no task is held out, all are taken.
    """
    if not config.reward_probe_samples or not tasks:
        return None
    kept_out = [task for task in tasks if is_held_out(str(task["task_id"]), config.reward_eval_fraction)]
    chosen = (kept_out or list(tasks))[: config.reward_probe_samples]
    return ProbeTasks(chosen, -(-config.reward_probe_samples // len(chosen)))


def probe(
    team: Team, model: JointRewardModel, oracle: Oracle, chosen: ProbeTasks, config: Config, *, iteration: int
) -> list[ProbeSample]:
    """Both rewards of the team's answers; the same random numbers before and after an update, so that they compare.

    The task reward is the one after `reward_processor`. Answers that either cannot score are left out.
    """
    samples = evaluate(
        team,
        oracle,
        chosen.tasks,
        samples_per_task=chosen.samples_per_task,
        sampling=sampling(config),
        seed=config.seed,
        side=f"probe {iteration}",
        tokens_per_batch=config.tokens_per_batch,
    )
    prompts = {str(task["task_id"]): team.prompts(task) for task in chosen.tasks}
    scored = _learned_scores(model, samples, prompts, config)
    return [
        ProbeSample(sample.task_id, sample.sample, score, sample.reward)
        for sample, score in zip(samples, scored, strict=True)
        if score is not None and sample.reward is not None
    ]


@dataclass
class Probes:
    """What the probes before and after an update say, as metrics `reward_model/...`; `warning` is the alarm."""

    metrics: dict[str, float] = field(default_factory=dict)
    warning: str | None = None


@contextmanager
def probing(
    team: Team, model: JointRewardModel, oracle: Oracle, tasks: Tasks, config: Config, iteration: int
) -> Iterator[Probes]:
    """Probe before and after the update in the block; the result is filled in at its end, and an alarm is logged."""
    result = Probes()
    chosen = probe_tasks(config, tasks)
    before = probe(team, model, oracle, chosen, config, iteration=iteration) if chosen else []
    yield result
    if chosen:
        after = probe(team, model, oracle, chosen, config, iteration=iteration)
        found = compare_probes(before, after)
        result.metrics, result.warning = prefixed(found.metrics), found.warning
        if found.warning is not None:
            logger.warning("iteration %d: %s", iteration, found.warning)


def compare_probes(before: Sequence[ProbeSample], after: Sequence[ProbeSample]) -> Probes:
    """Rank correlation and rewards before and after (`after/...`), their changes, and the alarm (1 or 0)."""
    metrics = probe_metrics(before) | {f"after/{name}": value for name, value in probe_metrics(after).items()}
    moved = changes(before, after)
    if moved is not None:
        metrics |= {"learned_reward_change": moved[0].mean, "oracle_reward_change": moved[1].mean}
    warning = exploitation_warning(before, after)
    return Probes(metrics | {"alarm": float(warning is not None)}, warning)


def prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under the reward model's name."""
    return {f"reward_model/{name}": value for name, value in metrics.items()}


def _learned_scores(
    model: JointRewardModel,
    samples: Sequence[EvaluatedSample],
    prompts: Mapping[str, tuple[str, ...]],
    config: Config,
) -> list[float | None]:
    texts = [JointText(prompts[sample.task_id], sample.texts) for sample in samples]
    return model.score(texts, config.tokens_per_batch)
