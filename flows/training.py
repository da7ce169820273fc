"""The training flow: prepare, one subflow per iteration, evaluate, report; what is up to date is not run again."""

import hashlib
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from prefect import Flow, flow

from comlrl_core.algorithms.shared import training_metrics
from comlrl_core.config.files import read_yaml
from comlrl_core.config.run import PreferenceRun, RewardRun, RunConfig, iteration_key
from comlrl_core.files import read_json
from comlrl_core.preference.files import iteration_path
from flows import pipeline
from flows.artifacts import publish_progress, publish_summary, summary_markdown
from flows.environment import MLFLOW_UI
from flows.iteration import iterate
from flows.jobs import Plan, lengthened, open_place, plan
from flows.parents import end_with_serve
from flows.preflight import check
from flows.project import Project
from flows.prune import is_pruned
from flows.registry import registered, repair
from tasks.calling import call, orchestrated
from tasks.evaluate import (
    collected_metrics,
    evaluate_iteration,
    evaluation_metrics,
    fall,
    measured_so_far,
    read_curve,
    summarize_run,
)
from tasks.job import Job
from tasks.loading import forget
from tasks.prepare import prepare
from tasks.report import picture_paths, report, report_path
from tasks.rollout import rollout_metrics
from tasks.steps import clear_aside, inputs_digest
from tasks.tracking import NullTracker, Tracker
from tasks.update import update_metrics

logger = logging.getLogger("comlrl_core.stages")

GIT_SECONDS = 5.0


@flow(name="preference-training", flow_run_name="{settings.algorithm}-seed{settings.training.seed}")
def preference_training(
    settings: PreferenceRun, project: Path | None = None, add_iterations: int = 0
) -> dict[str, Any]:
    """Train a team of language models from preferences.

    Args:
        settings: Every setting of the run. Settings other than those of the project's params.yaml work in a folder of
            their own, runs/<key>.
        project: The project folder; empty for the folder that serves this deployment.
        add_iterations: So many iterations more than the project has now (a schedule that trains on). The project's
            params.yaml is changed; settings other than its own are refused.
    """
    return _run(settings, project, add_iterations)


@flow(name="reward-training", flow_run_name="{settings.algorithm}-seed{settings.training.seed}")
def reward_training(settings: RewardRun, project: Path | None = None, add_iterations: int = 0) -> dict[str, Any]:
    """Train a team of language models from the rewards of its own answers.

    Args:
        settings: Every setting of the run. Settings other than those of the project's params.yaml work in a folder of
            their own, runs/<key>.
        project: The project folder; empty for the folder that serves this deployment.
        add_iterations: So many passes over the tasks more than the project has now. The project's params.yaml is
            changed; settings other than its own are refused.
    """
    return _run(settings, project, add_iterations)


def training_flow(config: RunConfig) -> "Flow[Any, dict[str, Any]]":
    """The flow that trains with the algorithm of `config`."""
    return reward_training if config.learns_from_rewards() else preference_training


def form_of(config: RunConfig) -> RunConfig:
    """`config` as the kind of run that its flow takes."""
    return (RewardRun if config.learns_from_rewards() else PreferenceRun).model_validate(config.values())


def _run(settings: RunConfig, project: Path | None, add_iterations: int) -> dict[str, Any]:
    home = Project.at(project) if project else Project.find()
    config = RunConfig.model_validate(settings.values())
    with registered(home):
        end_with_serve()
        repair(home)
        return train(home, lengthened(home, config, add_iterations) if add_iterations else config)


def train(project: Project, config: RunConfig) -> dict[str, Any]:
    """Bring the run that `config` describes up to date; returns its summary (`metrics.json`).

    Inside a flow run the stages are task runs and each iteration is a subflow; elsewhere they are plain calls.
    """
    planned = plan(project, config)
    check(planned.job, project.params if planned.place == project else "settings")  # before anything is written
    with planned.place.run_lock("run"):
        open_place(planned)
        clear_aside(planned.job)
        config.training.say_notices()
        tracker = open_tracker(planned)
        try:
            summary = _train(planned, tracker)
        except BaseException as error:
            tracker.finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        finally:
            forget()
        tracker.finish("FINISHED")
    return summary


def _train(planned: Plan, tracker: Tracker) -> dict[str, Any]:
    job = planned.job
    if not up_to_date(planned, "prepare"):
        with recorded(planned, "prepare"):
            call(prepare, job)
        log_evaluation(job, tracker, 0, call(evaluate_iteration, job, 0))
    log_datasets(job, tracker)
    shown = None
    for iteration in range(1, job.config.num_iterations + 1):
        if orchestrated():
            shown = publish_progress(iteration - 1, job.config.num_iterations, shown)
        stage = stage_of(job, iteration)
        if up_to_date(planned, stage, iteration):
            continue
        with tracker.iteration(iteration) as child:
            with recorded(planned, stage):
                metrics = call(iterate, job, iteration)
            log_iteration(job, tracker, child, iteration)
            log_evaluation(job, tracker, iteration, metrics)
    if orchestrated():
        publish_progress(job.config.num_iterations, job.config.num_iterations, shown)
    summary: dict[str, Any]
    if up_to_date(planned, "evaluate"):
        summary = read_json(job.metrics)
    else:
        with recorded(planned, "evaluate"):
            summary = call(summarize_run, job)
        finish_run(job, tracker, summary)
    _report(planned, tracker)
    return summary


def stage_of(job: Job, iteration: int) -> str:
    """The DVC stage of an iteration."""
    return f"{'train' if job.config.learns_from_rewards() else 'iterate'}@{iteration_key(iteration)}"


def _report(planned: Plan, tracker: Tracker) -> None:
    planned = for_report(planned)
    if up_to_date(planned, "report"):
        logger.info("everything is up to date")
        return
    with recorded(planned, "report"):
        call(report, planned.job)
    log_report(planned.job, tracker)


def for_report(planned: Plan) -> Plan:
    """The plan; where its pipeline has no stage for the report (one written by hand), DVC is not asked about it."""
    if planned.tracked and "report" not in (read_yaml(planned.project.dvc_yaml).get("stages") or {}):
        return replace(planned, tracked=False)
    return planned


def up_to_date(planned: Plan, stage: str, iteration: int = 0) -> bool:
    """Whether `stage` need not run: DVC says so (or can restore it), or, without DVC, its manifest fits its inputs."""
    job = planned.job
    if planned.tracked:
        changed = pipeline.status(job.work_root, stage)
        current = not changed or pipeline.restore(job.work_root, stage) or is_pruned(job, changed, iteration)
    elif stage in ("evaluate", "report"):
        current = False
    else:
        writes_pairs = iteration > 0 and not job.config.learns_from_rewards()
        present = (iteration_path(job.store.replay, iteration) if writes_pairs else job.train_tasks).is_file()
        current = (
            present
            and job.store.has(iteration)
            and job.store.manifest(iteration).inputs == inputs_digest(job, iteration)
        )
    if current:
        logger.info("%s is up to date", stage)
    return current


@contextmanager
def recorded(planned: Plan, stage: str) -> Iterator[None]:
    """Record with DVC what the block has written for `stage`, unless its inputs changed meanwhile."""
    if not planned.tracked:
        yield
        return
    inputs = pipeline.inputs_digest(planned.job.work_root, stage)
    yield
    pipeline.commit(planned.job.work_root, stage, expected_inputs=inputs)


def open_tracker(planned: Plan) -> Tracker:
    """The MLflow run of this job, found again by its key, or a tracker that does nothing."""
    job = planned.job
    settings = job.config.tracking
    if not settings.enabled:
        return NullTracker()
    tracker = Tracker(planned.project.state_root, experiment=settings.experiment)
    training = job.config.training
    tags = {"algorithm": job.config.algorithm, "package": job.code[:16], "work_root": str(job.work_root)}
    tags |= versions() | git_commit(planned.project.work_root)
    if orchestrated():
        tags["prefect.flow_run"] = flow_run_url()
    if training.top_p < 1.0 or training.top_k is not None:
        tags["truncated_sampler"] = f"top_p={training.top_p}, top_k={training.top_k}"
    values = job.config.values()
    values.pop("num_iterations")
    name = f"{job.config.algorithm} {job.key()}"
    tracker.open(job.key(), name, values, tags)
    return tracker


def log_datasets(job: Job, tracker: Tracker) -> None:
    """The task files as data-set inputs of the run, by the digest that DVC records for them; logging twice is once."""
    _log_dataset(job, tracker, "tasks-train", job.train_tasks, "training")
    _log_dataset(job, tracker, "tasks-eval", job.eval_tasks, "evaluation")


def _log_dataset(job: Job, tracker: Tracker, name: str, path: Path, context: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    tracker.log_dataset(name, digest, path.relative_to(job.source_root).as_posix(), context)


def log_iteration(job: Job, tracker: Tracker, child: Tracker, iteration: int) -> None:
    """An iteration's collection and update, over environment steps: in its own run, and the curve in the parent."""
    before = job.store.manifest(iteration - 1).environment_steps
    after = job.store.manifest(iteration).environment_steps
    if job.config.learns_from_rewards():
        collections = [(row, int(row["environment_steps"])) for row in rollout_metrics(job, iteration)]
    else:
        collections = [(collected_metrics(job, iteration), before)]
        pairs = iteration_path(job.store.replay, iteration)
        if pairs.is_file():
            _log_dataset(job, child, f"replay-{iteration_key(iteration)}", pairs, "replay")
    for collection, steps in collections:
        child.log_metrics(collection, steps)
        tracker.log_metrics(collection, steps)
    last_logged = before
    every = job.config.training.logging_steps
    rows = update_metrics(job, iteration)
    for row in rows:
        steps = row["environment_steps"]
        if steps - last_logged >= every or row is rows[-1]:
            last_logged = steps
            metrics = training_metrics(row)
            child.log_metrics(metrics, steps)
            tracker.log_metrics(metrics, steps)
    tracker.log_metrics({"iteration": iteration}, after)


def log_evaluation(job: Job, tracker: Tracker, iteration: int, metrics: dict[str, float]) -> None:
    """An evaluation in the run's curve; says so when the team has fallen well below its best so far.

    The best so far may have been measured by another process: before a kill, or by the stage of its iteration.
    """
    if not metrics:
        return
    tracker.log_metrics(metrics, job.store.manifest(iteration).environment_steps)
    warning = fall([*measured_so_far(job, iteration - 1), {"iteration": iteration, **metrics}])
    if warning:
        logger.warning("iteration %d: %s", iteration, warning)


def complete_curves(job: Job, tracker: Tracker) -> None:
    """Log what is there and was not logged: its process was killed in between, or DVC restored it.

    Steps that are logged already stay as they are.
    """
    if tracker.run_id is None:
        return
    for iteration in range(job.config.num_iterations + 1):
        if not job.store.has(iteration):
            continue
        if iteration > 0 and job.store.has(iteration - 1):
            log_iteration(job, tracker, NullTracker(), iteration)
        tracker.log_metrics(evaluation_metrics(job, iteration), job.store.manifest(iteration).environment_steps)


def finish_run(job: Job, tracker: Tracker, summary: dict[str, Any]) -> None:
    """The last iteration's policies as an MLflow model, the plots as artifacts, and the summary for people."""
    complete_curves(job, tracker)
    last = job.config.num_iterations
    for path in sorted(job.plots.glob("*.csv")):
        tracker.log_artifact(path, "plots")
    if job.config.tracking.log_policies:
        evaluation = {f"eval/{k}": v for k, v in summary.get("evaluation", {}).items() if isinstance(v, float)}
        steps = job.store.manifest(last).environment_steps
        tracker.log_policy(job.store.policy(last), f"policies-{iteration_key(last)}", evaluation, steps)
    if orchestrated():
        links = {"the report": report_path(job).as_uri()}
        if tracker.run_id is not None and MLFLOW_UI in os.environ:
            links["MLflow"] = f"{os.environ[MLFLOW_UI]}/#/{tracker.place}"
        publish_summary(summary_markdown(read_curve(job.plots / "evaluation.csv"), links))


def log_report(job: Job, tracker: Tracker) -> None:
    """The report and its pictures as artifacts."""
    tracker.log_artifact(report_path(job))
    for path in picture_paths(job):
        tracker.log_artifact(path, "plots")


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    names = ("comlrl", "torch", "transformers", "datasets", "prefect", "dvc", "mlflow")
    return {f"version.{name}": metadata.version(name) for name in names}


def git_commit(folder: Path) -> dict[str, str]:
    """The commit that the project's files are at, under MLflow's name for it; nothing outside of a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
        return {"mlflow.source.git.commit": found}
    return {}


def flow_run_url() -> str:
    """Where this flow run is shown."""
    from prefect.runtime import flow_run

    return str(flow_run.ui_url)
