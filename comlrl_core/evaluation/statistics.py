"""Means, standard errors and win rates over evaluated samples.

Samples of one task are not independent, so the task is the unit everywhere: standard errors come from task means, and a
win rate's interval counts tasks, not samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from comlrl_core.evaluation.evaluate import EvaluatedSample


def summarize(samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """Mean reward with its standard error over tasks, answer lengths and the share of answers ended by EOS.

    Keys: `reward_mean`, `reward_se` (standard deviation of task means / sqrt(tasks); 0 for one task), `tasks`,
    `samples`, `dropped`, and per agent `agent_i/characters`, `agent_i/tokens`, `agent_i/finished`.
    """
    scored = [sample for sample in samples if sample.reward is not None]
    means = [fmean(values) for values in _by_task(scored).values()]
    summary = {
        "reward_mean": fmean(means) if means else math.nan,
        "reward_se": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
        "tasks": float(len(means)),
        "samples": float(len(scored)),
        "dropped": float(len(samples) - len(scored)),
    }
    for agent in range(len(samples[0].tokens) if samples else 0):
        summary[f"agent_{agent + 1}/characters"] = fmean(sample.characters[agent] for sample in samples)
        summary[f"agent_{agent + 1}/tokens"] = fmean(sample.tokens[agent] for sample in samples)
        summary[f"agent_{agent + 1}/finished"] = fmean(sample.finished[agent] for sample in samples)
    return summary


@dataclass(frozen=True)
class WinRate:
    """Share of comparisons won (a tie counts one half), with its confidence interval; `tasks` is the sample size."""

    rate: float
    low: float
    high: float
    tasks: int


def win_rate(
    samples: Sequence[EvaluatedSample], opponents: Sequence[EvaluatedSample], confidence: float = 0.95
) -> WinRate:
    """How often `samples` beat `opponents`, compared sample by sample on the same tasks.

    The interval is Wilson's score interval with the number of tasks as sample size: it keeps its width when every
    comparison is won, and treats the samples of one task as one observation.
    """
    other = {(sample.task_id, sample.sample): sample.reward for sample in opponents}
    wins: dict[str, list[float]] = {}
    for sample in samples:
        theirs = other.get((sample.task_id, sample.sample))
        if sample.reward is None or theirs is None:
            continue
        wins.setdefault(sample.task_id, []).append(0.5 if sample.reward == theirs else float(sample.reward > theirs))
    rates = [fmean(values) for values in wins.values()]
    if not rates:
        return WinRate(math.nan, 0.0, 1.0, 0)
    low, high = wilson_interval(fmean(rates), len(rates), confidence)
    return WinRate(fmean(rates), low, high, len(rates))


def wilson_interval(rate: float, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a proportion `rate` seen in `count` trials."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _by_task(samples: Sequence[EvaluatedSample]) -> dict[str, list[float]]:
    grouped: dict[str, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            grouped.setdefault(sample.task_id, []).append(sample.reward)
    return grouped
