"""How far a reward model can be trusted: on held-out tasks, and on what the policies write now."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from comlrl_core.randomness import stream_key
from comlrl_core.rl.bradley_terry import bradley_terry_accuracy, bradley_terry_loss

CALIBRATION_BINS = 10
STANDARD_ERRORS = 2.0  # a change counts when it exceeds this many


def is_held_out(task: str, fraction: float) -> bool:
    """Whether a task belongs to the held-out share: by a hash of its id alone, the same in every iteration and run."""
    return stream_key("reward model", "held out", task) < fraction * 2**128


@dataclass(frozen=True)
class HeldOut:
    """What a reward model does on pairs of tasks that it was not fitted to; `pairs` is the sample size.

    `accuracy`: share of pairs whose winner scores higher (equal scores count one half). `margin`: mean of
    r(winner) - r(loser). `ece`: expected calibration error (arXiv 1706.04599) of the preferred side's probability.
    """

    pairs: int
    accuracy: float
    margin: float
    loss: float
    ece: float


def held_out(winner_scores: Tensor, loser_scores: Tensor) -> HeldOut | None:
    """Measures of `P` pairs from their scores, `[P]` each; None without a pair."""
    if not len(winner_scores):
        return None
    winners, losers = winner_scores.double(), loser_scores.double()
    return HeldOut(
        pairs=len(winners),
        accuracy=bradley_terry_accuracy(winners, losers).mean().item(),
        margin=(winners - losers).mean().item(),
        loss=bradley_terry_loss(winners, losers).mean().item(),
        ece=calibration_error(winners - losers),
    )


def calibration_error(margins: Tensor, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error of Bradley-Terry probabilities, given each pair's r(winner) - r(loser), `[P]`.

    The side that the model prefers has a probability in [1/2, 1]: it should be right that often. The sum over `bins`
    equal bins of |share right - mean probability|, weighted with the share of pairs in the bin.
    """
    confidence = torch.sigmoid(margins.double().abs())
    right = (margins.double().sign() + 1) / 2
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    error = 0.0
    for index in place.unique():
        inside = place == index
        error += (right[inside].mean() - confidence[inside].mean()).abs().item() * inside.sum().item()
    return error / len(margins)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None where one side is constant or shorter than 2."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values against {len(second)}")
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    a, b = _centred_ranks(first), _centred_ranks(second)
    return float((a * b).sum() / (a.norm() * b.norm()))


@dataclass(frozen=True)
class ProbeSample:
    """One joint response of the policies, scored by the reward model and by the oracle."""

    task: str
    sample: int
    learned: float
    oracle: float


@dataclass(frozen=True)
class Change:
    """The mean change of a reward from the team before to the team after an update, and its standard error."""

    mean: float
    standard_error: float

    @property
    def rises(self) -> bool:
        return self.mean > STANDARD_ERRORS * self.standard_error

    @property
    def falls(self) -> bool:
        return -self.mean > STANDARD_ERRORS * self.standard_error


def changes(before: Sequence[ProbeSample], after: Sequence[ProbeSample]) -> tuple[Change, Change] | None:
    """How the learned and the oracle's reward moved between two probes of the same tasks; None without a common one.

    Compared are the means of each task: its samples are not independent of each other.
    """
    first, second = _by_task(before), _by_task(after)
    common = [task for task in first if task in second]
    if not common:
        return None
    learned = [second[task][0] - first[task][0] for task in common]
    oracle = [second[task][1] - first[task][1] for task in common]
    return _change(learned), _change(oracle)


def exploitation_warning(before: Sequence[ProbeSample], after: Sequence[ProbeSample]) -> str | None:
    """The alarm: the learned reward rose while the oracle's fell, each by more than two standard errors."""
    found = changes(before, after)
    if found is None or not (found[0].rises and found[1].falls):
        return None
    learned, oracle = found
    return (
        f"the reward model is being exploited: its reward rose by {learned.mean:.3g} while the task reward fell by "
        f"{-oracle.mean:.3g} (twice the standard errors: {STANDARD_ERRORS * learned.standard_error:.2g} and "
        f"{STANDARD_ERRORS * oracle.standard_error:.2g}). Try more distinct pairs (more candidates or "
        "preference_replay_mode: all_history), fewer updates per iteration (num_train_epochs), a smaller "
        "agent_learning_rate, or reference_kl_enabled"
    )


def probe_metrics(samples: Sequence[ProbeSample]) -> dict[str, float]:
    """`rank_correlation` (left out where it is undefined), and both mean rewards."""
    if not samples:
        return {}
    metrics = {
        "samples": float(len(samples)),
        "learned_reward_mean": fmean(sample.learned for sample in samples),
        "oracle_reward_mean": fmean(sample.oracle for sample in samples),
    }
    correlation = rank_correlation([s.learned for s in samples], [s.oracle for s in samples])
    return metrics if correlation is None else {**metrics, "rank_correlation": correlation}


def held_out_metrics(measured: HeldOut | None) -> Mapping[str, float]:
    """As metrics: `heldout_pairs` always, the rest where there is a pair."""
    if measured is None:
        return {"heldout_pairs": 0.0}
    return {
        "heldout_pairs": float(measured.pairs),
        "heldout_accuracy": measured.accuracy,
        "heldout_margin": measured.margin,
        "heldout_loss": measured.loss,
        "heldout_ece": measured.ece,
    }


def _centred_ranks(values: Sequence[float]) -> Tensor:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = torch.empty(len(values), dtype=torch.float64)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        ranks[order[start:end]] = (start + end - 1) / 2
        start = end
    return ranks - ranks.mean()


def _by_task(samples: Sequence[ProbeSample]) -> dict[Hashable, tuple[float, float]]:
    grouped: dict[Hashable, list[ProbeSample]] = {}
    for sample in samples:
        grouped.setdefault(sample.task, []).append(sample)
    return {
        task: (fmean(s.learned for s in of_task), fmean(s.oracle for s in of_task)) for task, of_task in grouped.items()
    }


def _change(differences: Sequence[float]) -> Change:
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Change(fmean(differences), error)
