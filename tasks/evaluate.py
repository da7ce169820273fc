"""Evaluate: the policies of each iteration answer the held-out tasks; metrics, curves and win rates come of
it.
"""

import csv
import io
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import task

from comlrl_core.algorithms.preference_learning import sampling
from comlrl_core.comparators.history import history_index
from comlrl_core.comparators.opening import comparator_sources
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.digests import digest_values
from comlrl_core.errors import DataError
from comlrl_core.evaluation import EvaluatedSample, WinRate, evaluate, summarize, win_rate
from comlrl_core.evaluation.collapse import Measured, collapse_warning
from comlrl_core.evaluation.evaluate import sample_from_json, sample_to_json
from comlrl_core.files import atomic_write_text, iter_jsonl, sha256_file, write_json, write_jsonl
from comlrl_core.preference.files import read_meta
from comlrl_core.preference.iteration import collection_metrics
from comlrl_core.rollout.evaluation import evaluate_turns
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.loading import eval_tasks, is_live, live, load_models, policy, settle, transition
from tasks.oracle import oracle
from tasks.pruned import Pruned, manifest_of
from tasks.reward_model import reward_model_metrics
from tasks.rollout import rollout_metrics
from tasks.steps import clear_before
from tasks.update import update_metrics

logger = logging.getLogger("comlrl_core.stages")


@task(name="evaluate", task_run_name="evaluate-{iteration}", **OPTIONS)
def evaluate_iteration(job: Job, iteration: int) -> dict[str, float]:
    """Rewards, lengths and win rates of the policies that `iteration` left behind; `{}` without held-out tasks."""
    metrics = evaluation_metrics(job, iteration)
    if metrics:
        logger.info(
            "iteration %d: evaluation reward %.3f +- %.3f",
            iteration,
            metrics["eval/reward_mean"],
            metrics["eval/reward_se"],
        )
    return metrics


def evaluation_metrics(job: Job, iteration: int) -> dict[str, float]:
    """What `evaluate_iteration` reports; samples of an earlier call are used again."""
    if not eval_tasks(job):
        return {}
    settle(job)
    turns = policy_turns(job, iteration, "team")
    samples = over_turns(turns)
    metrics = {f"eval/{name}": value for name, value in summarize(samples).items()}
    expected = 0.0
    for turn in range(len(turns), 0, -1):
        reward = summarize(turns[turn - 1])["reward_mean"]
        expected += reward
        metrics |= {f"eval/turn_{turn}/reward_mean": reward, f"eval/turn_{turn}/expected_return": expected}
    for name, opponents in opponents_of(job, iteration).items():
        rate = win_rate(samples, opponents, job.config.evaluation.confidence)
        metrics |= _win_metrics(name, rate)
        if name == "comparator":
            theirs = summarize(opponents)
            metrics |= {f"eval/comparator/{key}": theirs[key] for key in ("reward_mean", "reward_se")}
    return metrics


def policy_samples(job: Job, iteration: int, side: str) -> list[EvaluatedSample]:
    """Evaluated samples of an iteration's policies; over several turns, with the mean of their rewards."""
    return over_turns(policy_turns(job, iteration, side))


def policy_turns(job: Job, iteration: int, side: str) -> list[list[EvaluatedSample]]:
    """Evaluated samples of an iteration's policies for each turn, from the file of an earlier call if there is one."""
    path = _evaluated_path(job, iteration, side)
    if not path.is_file() and not job.store.has(iteration):
        raise Pruned(f"iteration {iteration} was pruned, and its answers to the held-out tasks are not kept")
    return _turns(job, path, side, lambda: _team(job, iteration))


def _evaluated_path(job: Job, iteration: int, side: str) -> Path:
    key = digest_values(manifest_of(job, iteration).policy, side, _evaluation_identity(job))
    return job.evaluations / f"iteration_{iteration:04d}-{side}-{key[:16]}.jsonl"


def measured_so_far(job: Job, iteration: int) -> list[dict[str, float]]:
    """The mean reward, with its standard error, of each iteration up to `iteration` that was evaluated; runs no model.

    What was measured otherwise (other settings, other tasks) does not count.
    """
    curve: list[dict[str, float]] = []
    for number in range(iteration + 1):
        try:
            path = _evaluated_path(job, number, "team")
        except DataError:  # pruned, or not there
            continue
        found = _measured(path, job.config.training.num_turns) if path.is_file() else {}
        if math.isfinite(found.get("reward_mean", math.nan)):  # not where every reward was dropped
            curve.append({"iteration": number, **{f"eval/{name}": value for name, value in found.items()}})
    return curve


@cache  # a file's name tells its content
def _measured(path: Path, num_turns: int) -> dict[str, float]:
    summary = summarize(over_turns(_read_turns(path, num_turns)))
    return {name: summary[name] for name in ("reward_mean", "reward_se")}


def over_turns(turns: Sequence[Sequence[EvaluatedSample]]) -> list[EvaluatedSample]:
    """One sample per task and sample number: the last turn's answers with the mean reward of all turns.

    A chain that a dropped reward cut short has no reward.
    """
    if len(turns) == 1:
        return list(turns[0])
    chains: dict[tuple[str, int], list[EvaluatedSample]] = {}
    for samples in turns:
        for sample in samples:
            chains.setdefault((sample.task_id, sample.sample), []).append(sample)
    combined = []
    for chain in chains.values():
        rewards = [sample.reward for sample in chain if sample.reward is not None]
        whole = len(rewards) == len(turns)
        combined.append(replace(chain[-1], reward=fmean(rewards) if whole else None))
    return combined


def opponents_of(job: Job, iteration: int) -> dict[str, list[EvaluatedSample]]:
    """Samples of those that the policies are compared with: the initial team, the iteration before, the
    comparator. Pruned ones whose answers are not kept are left out.
    """
    if iteration == 0:
        return {}
    opponents = {"initial": policy_samples(job, 0, "team")}
    with suppress(Pruned):
        opponents["previous"] = policy_samples(job, iteration - 1, "team")
    training = job.config.training
    if not isinstance(training, ComparatorFields):
        return opponents
    if training.comparator_policy == "history":
        index = history_index(iteration, training.comparator_history_k)
        with suppress(Pruned):
            opponents["comparator"] = policy_samples(job, index, "team")
    elif training.comparator_policy == "model":
        sources = comparator_sources(training, training.num_agents)
        key = digest_values(sources, _evaluation_identity(job))
        opponents["comparator"] = over_turns(
            _turns(
                job,
                job.evaluations / f"comparator-{key[:16]}.jsonl",
                "comparator",
                lambda: load_models(job, sources, training.comparator_devices),
            )
        )
    else:  # the team before this update, with a random stream of its own
        with suppress(Pruned):
            opponents["comparator"] = policy_samples(job, iteration - 1, "comparator")
    return opponents


def _turns(job: Job, path: Path, side: str, team: Callable[[], Team]) -> list[list[EvaluatedSample]]:
    if path.is_file():
        return _read_turns(path, job.config.training.num_turns)
    turns = _evaluate(job, side, team())
    rows = ({"turn": turn, **sample_to_json(sample)} for turn, samples in enumerate(turns) for sample in samples)
    write_jsonl(path, rows)
    return turns


def _read_turns(path: Path, num_turns: int) -> list[list[EvaluatedSample]]:
    turns: list[list[EvaluatedSample]] = [[] for _ in range(num_turns)]
    for number, values in iter_jsonl(path):
        where = f"{path}: line {number}"
        turn = values.pop("turn", None)
        if type(turn) is not int or not 0 <= turn < len(turns):
            raise DataError(f"{where}: field 'turn': expected a number from 0 to {len(turns) - 1}, found {turn!r}")
        turns[turn].append(sample_from_json(values, where))
    return turns


def _evaluate(job: Job, side: str, team: Team) -> list[list[EvaluatedSample]]:
    settings, training = job.config.evaluation, job.config.training
    if training.num_turns == 1:
        samples = evaluate(
            team,
            oracle(job),
            eval_tasks(job),
            samples_per_task=settings.samples_per_task,
            sampling=evaluation_sampling(job),
            seed=training.seed,
            side=side,
            batch_size=settings.batch_size,
            tokens_per_batch=training.tokens_per_batch,
        )
        return [samples]
    turns: list[list[EvaluatedSample]] = [[] for _ in range(training.num_turns)]
    for number in range(settings.samples_per_task):
        chains = evaluate_turns(
            team,
            oracle(job),
            eval_tasks(job),
            num_turns=training.num_turns,
            transition=transition(job),
            sampling=evaluation_sampling(job),
            seed=training.seed,
            side=f"{side}-{number}",
            batch_size=settings.batch_size,
            tokens_per_batch=training.tokens_per_batch,
        )
        for turn, samples in zip(turns, chains, strict=True):
            turn += [replace(sample, sample=number) for sample in samples]
    return turns


def evaluation_sampling(job: Job) -> Sampling:
    """Like in training, or greedy."""
    settings = sampling(job.config.training)
    if not job.config.evaluation.greedy:
        return settings
    return Sampling(max_new_tokens=settings.max_new_tokens, temperature=0.0)


def _team(job: Job, iteration: int) -> Team:
    return live(job, iteration).team if is_live(job, iteration) else policy(job, iteration)


def _evaluation_identity(job: Job) -> list[Any]:
    training = job.config.training
    return [
        job.config.evaluation.model_dump(exclude={"confidence"}),
        [training.max_new_tokens, training.temperature, training.top_p, training.top_k],
        [training.seed, training.num_threads, training.tokens_per_batch],
        job.config.team.model_dump(mode="json"),
        job.config.reward.model_dump(mode="json"),
        oracle(job).label,
        sha256_file(job.eval_tasks),
        job.code,
    ]


def _win_metrics(name: str, rate: WinRate) -> dict[str, float]:
    return {
        f"eval/win_rate_{name}": rate.rate,
        f"eval/win_rate_{name}_low": rate.low,
        f"eval/win_rate_{name}_high": rate.high,
    }


@task(name="summarize", **OPTIONS)
def summarize_run(job: Job) -> dict[str, Any]:
    """Write `metrics.json` and `plots/*.csv` over all iterations; returns what `metrics.json` holds."""
    last = job.config.num_iterations
    clear_before(job, last + 1)
    curve = evaluation_curve(job) if eval_tasks(job) else []
    write_curve(job.plots / "evaluation.csv", curve)
    collections = [{"iteration": i, **collected_metrics(job, i)} for i in range(1, last + 1)]
    write_curve(job.plots / "collection.csv", collections)
    updates = [row for i in range(1, last + 1) for row in update_metrics(job, i)]
    write_curve(job.plots / "training.csv", updates)
    summary = run_summary(curve, updates)
    write_json(job.metrics, summary, indent=2)
    return summary


def collected_metrics(job: Job, iteration: int) -> dict[str, float]:
    """What an iteration collected: rewards of both sides and pairs, or means over its rollouts."""
    if not job.config.learns_from_rewards():
        meta = read_meta(job.store.replay, iteration)
        return collection_metrics(meta) | reward_model_metrics(job, iteration)
    rows = rollout_metrics(job, iteration)
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: fmean(found) for name, found in values.items() if found and name != "iteration"}


def evaluation_curve(job: Job) -> list[dict[str, Any]]:
    """The evaluation of every iteration; one that was pruned and is measured otherwise now is left out."""
    curve: list[dict[str, Any]] = []
    for iteration in range(job.config.num_iterations + 1):
        try:
            curve.append({"iteration": iteration, **evaluation_metrics(job, iteration)})
        except Pruned as gone:
            logger.warning("%s: the curve goes without it", gone)
    return curve


def run_summary(curve: list[dict[str, Any]], updates: list[dict[str, Any]]) -> dict[str, Any]:
    """The few numbers that tell how a run went: first, best and last evaluation, and where training ended."""
    summary: dict[str, Any] = {}
    if curve:
        rewards = [row["eval/reward_mean"] for row in curve]
        best = max(range(len(rewards)), key=rewards.__getitem__)
        summary["evaluation"] = {
            "initial_reward": rewards[0],
            "final_reward": rewards[-1],
            "final_reward_se": curve[-1]["eval/reward_se"],
            "best_reward": rewards[best],
            "best_iteration": curve[best]["iteration"],
            "win_rate_initial": curve[-1].get("eval/win_rate_initial"),
            "win_rate_previous": curve[-1].get("eval/win_rate_previous"),
            "win_rate_comparator": curve[-1].get("eval/win_rate_comparator"),
        }
    if updates:
        summary["training"] = {
            "updates": len(updates),
            "skipped_updates": sum(int(row["skipped"]) for row in updates),
            "environment_steps": updates[-1]["environment_steps"],
            "final_loss": updates[-1]["loss"],
            "final_accuracy": updates[-1].get("accuracy"),
        }
    return summary


def fall(curve: Sequence[dict[str, float]]) -> str | None:
    """A sentence where the newest evaluation of a run is well below the best one so far."""
    return collapse_warning(
        [Measured(f"iteration {row['iteration']:.0f}", row["eval/reward_mean"], row["eval/reward_se"]) for row in curve]
    )


def write_curve(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as CSV with the union of their columns, in order of first appearance; `/` in names becomes `.` for
    plots.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, [_column(name) for name in columns], lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({_column(name): "" if value is None else value for name, value in row.items()})
    atomic_write_text(path, text.getvalue())


def read_curve(path: Path) -> list[dict[str, float]]:
    """The rows that `write_curve` wrote, without empty cells."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def _column(name: str) -> str:
    return name.replace("/", "_")
