"""Fit: the joint reward model of an iteration, between the draw of pairs and the update of the policies (MARLHF)."""

import logging
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import task

from comlrl_core.algorithms import marlhf
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import Learned, Metrics
from comlrl_core.engine.processes import by_first
from comlrl_core.files import read_json, write_json
from comlrl_core.preference.reward_model import JointRewardModel, save_reward_model
from comlrl_core.preference.reward_model.files import FOLDER
from comlrl_core.rewards.contract import Oracle
from tasks.calling import OPTIONS
from tasks.job import Job
from tasks.launching import launched
from tasks.loading import Live, model_source, reference, settle, train_tasks
from tasks.oracle import oracle
from tasks.pruned import curve_path
from tasks.records import read_records
from tasks.steps import Steps, steps_of

logger = logging.getLogger("comlrl_core.stages")

METRICS = "reward_model.json"
DIVERGENCE = "kl/"


@task(name="fit", **OPTIONS)
@launched
def fit(job: Job, iteration: int) -> Path:
    """Fit the reward model to the drawn pairs; returns the file of its measures.

    The model lies beside it (`reward_model/`): this iteration's, or the one before where there was nothing to fit.
    """
    steps = steps_of(job, iteration)
    if steps.fit.is_file():
        return steps.fit
    settle(job)
    config = job.reward_model
    team = job.config.team
    sources = [model_source(job, name) for name in team.agents or [team.agent_model or ""]]
    named = config.reward_model_name
    model, result = marlhf.fit_or_keep(
        read_records(steps.drawn),
        config,
        iteration=iteration,
        source=model_source(job, named) if named else marlhf.base_source(config, sources),
        newest=newest(job, iteration - 1),
        model_config=team.model_options,
    )
    if model is not None:
        save_reward_model(model, steps.reward_model)
    metrics = marlhf.prefixed(result.metrics())
    accuracy = metrics.get("reward_model/heldout_accuracy")
    logger.info(
        "iteration %d: reward model fitted to %d pairs%s",
        iteration,
        result.train_pairs,
        "" if accuracy is None else f", right on {accuracy:.0%} of held-out pairs",
    )
    by_first(lambda: write_json(steps.fit, {"train_pairs": result.train_pairs, "metrics": metrics}, indent=2))
    return steps.fit


def learn_from_reward_model(job: Job, iteration: int, steps: Steps, left: Live) -> tuple[Learned, dict[str, Any]]:
    """Update the policies with the scores of the fitted model; what was learned, and the model's measures."""
    config = job.reward_model
    fitted = read_json(steps.fit)
    metrics: dict[str, Any] = fitted["metrics"]
    if not fitted["train_pairs"]:
        return Learned([], left.environment_steps), metrics
    model = marlhf.fitted_reward_model(config, steps.reward_model)
    tasks, truth = train_tasks(job), oracle(job)
    chosen = marlhf.probe_tasks(config, tasks)
    before = marlhf.probe(left.team, model, truth, chosen, config, iteration=iteration) if chosen else []
    divergences: dict[str, list[float]] = {}

    def on_rollout(found: Metrics, environment_steps: int) -> None:
        for name in [name for name in found if name.startswith(DIVERGENCE)]:
            divergences.setdefault(name, []).append(found[name])

    learned = marlhf.update_policies(
        left.team,
        left.engines,
        tasks,
        model,
        config,
        iteration=iteration,
        learned=Learned([], left.environment_steps),
        critics=left.critics,
        reference=reference(job, left.team) if marlhf.needs_reference(config) else None,
        hooks=Hooks(on_rollout=on_rollout),
    )
    metrics |= {name: fmean(values) for name, values in divergences.items()}
    if chosen:
        after = marlhf.probe(left.team, model, truth, chosen, config, iteration=iteration)
        probes = marlhf.compare_probes(before, after)
        metrics |= marlhf.prefixed(probes.metrics)
        if probes.warning is not None:
            logger.warning("iteration %d: %s", iteration, probes.warning)
    return learned, metrics


def newest(job: Job, iteration: int) -> JointRewardModel | None:
    """The reward model that `iteration` left behind, frozen; None where there is none yet."""
    folder = job.store.policy(iteration) / FOLDER
    return marlhf.fitted_reward_model(job.reward_model, folder) if folder.is_dir() else None


def pair_oracle(job: Job, iteration: int) -> Oracle:
    """Who decides the pairs of `iteration`: the task reward, or the newest reward model where the settings say so."""
    truth = oracle(job)
    if not job.config.fits_reward_model():
        return truth
    return marlhf.scoring_oracle(job.reward_model, truth, newest(job, iteration - 1))


def reward_model_metrics(job: Job, iteration: int) -> dict[str, float]:
    """The measures of a published iteration's reward model, and the divergences of its rollouts from a reference.

    None for other algorithms.
    """
    path = curve_path(job, iteration, METRICS)
    return {name: float(v) for name, v in read_json(path).items() if v is not None} if path.is_file() else {}
