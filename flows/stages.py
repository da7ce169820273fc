"""Single stages, as `dvc repro` and people call them."""

import os
from pathlib import Path

from comlrl_core.config.run import RunConfig
from comlrl_core.errors import ConfigError
from comlrl_core.team.checkpoint import AGENT_PREFIX, save_merged, save_team
from flows.iteration import iterate
from flows.jobs import check_stage, plan
from flows.prefect_api import healthy, read_record
from flows.preflight import check
from flows.project import Project
from flows.registry import repair
from flows.training import (
    finish_run,
    for_report,
    log_datasets,
    log_evaluation,
    log_iteration,
    log_report,
    open_tracker,
    recorded,
)
from tasks.calling import call
from tasks.evaluate import evaluation_metrics, summarize_run
from tasks.job import Job
from tasks.loading import policy
from tasks.prepare import prepare
from tasks.report import report
from tasks.steps import clear_aside
from tasks.tracking import Tracker

ORPHAN_SECONDS = 5.0  # a stage whose dvc was killed sees it and stops well within this time
STAGES = ("prepare", "iterate", "train", "evaluate", "report")


def run_stage(project: Project, config: RunConfig, name: str, iteration: str | None) -> None:
    """Run one stage of the project's pipeline; an iteration is a flow run where a Prefect server answers."""
    if name not in STAGES:
        raise ConfigError(f"stage {name!r} is unknown; allowed are {', '.join(STAGES)}")
    number = _number(name, iteration, config)
    planned = plan(project, config)
    if name != "report":  # a page about what is there
        check(planned.job, project.params, stage=name, iteration=number)
    with project.run_lock(f"stage {name}", patience=ORPHAN_SECONDS):
        check_stage(planned.job, project)
        clear_aside(planned.job)
        tracker = open_tracker(planned)
        try:
            if name == "prepare":
                call(prepare, planned.job)
                log_datasets(planned.job, tracker)
            elif name in ("iterate", "train"):
                log_datasets(planned.job, tracker)
                _iterate(planned.job, number, tracker, project)
            elif name == "evaluate":
                finish_run(planned.job, tracker, call(summarize_run, planned.job))
            else:
                call(report, planned.job)
                log_report(planned.job, tracker)
        except BaseException as error:
            tracker.finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        tracker.finish("FINISHED")


def _iterate(job: Job, number: int, tracker: Tracker, project: Project) -> None:
    with tracker.iteration(number) as child:
        if _server(project):
            repair(project)
            metrics = iterate(job, number)
        else:
            metrics = iterate.fn(job, number)
        log_iteration(job, tracker, child, number)
        log_evaluation(job, tracker, number, metrics)


def _server(project: Project) -> bool:
    """Whether a Prefect server answers, at `PREFECT_API_URL` or started for this project."""
    record = read_record(project.state_root) or {}
    url = os.environ.get("PREFECT_API_URL") or record.get("url")
    if not url or not healthy(url):
        return False
    os.environ["PREFECT_API_URL"] = url
    return True


def _number(name: str, iteration: str | None, config: RunConfig) -> int:
    if name not in ("iterate", "train"):
        if iteration is not None:
            raise ConfigError(f"--iteration belongs to stages iterate and train, not to {name}")
        return 0
    expected = "train" if config.learns_from_rewards() else "iterate"
    if name != expected:
        raise ConfigError(f"stage {name} does not belong to algorithm: {config.algorithm}; its stage is {expected}")
    if iteration is None or not iteration.isdigit() or not 1 <= int(iteration) <= config.num_iterations:
        raise ConfigError(f"--iteration must be a number from 0001 to {config.num_iterations:04d}, not {iteration}")
    return int(iteration)


def write_report(project: Project, config: RunConfig) -> Path:
    """Write the report of the run that `config` describes from what is there; returns the page's path."""
    planned = for_report(plan(project, config))
    job = planned.job
    if not job.work_root.is_dir():
        raise ConfigError(f"{job.work_root} does not exist; `comlrl run` with the same settings makes it")
    inputs = [job.metrics, *(job.plots / f"{name}.csv" for name in ("evaluation", "collection", "training"))]
    with planned.place.run_lock("report"):
        if not all(path.is_file() for path in inputs):  # DVC records a stage whose inputs are there
            return Path(report.fn(job))
        with recorded(planned, "report"):
            return Path(report.fn(job))


def evaluate_policies(project: Project, config: RunConfig, iteration: int | None) -> dict[str, float]:
    """Metrics of a published iteration's policies (default: the newest) on the held-out tasks."""
    job = plan(project, config).job
    number = _published(job, iteration)
    metrics = evaluation_metrics(job, number)
    if not metrics:
        raise ConfigError("tasks.eval is null: there are no held-out tasks to evaluate on")
    return {"iteration": float(number), **metrics}


def export_policies(
    project: Project, config: RunConfig, folder: Path, iteration: int | None, adapters: bool = False
) -> tuple[int, list[Path]]:
    """Write the policies of a published iteration (default: the newest) into a new folder, one per agent.

    Args:
        adapters: of a run with `team.lora`, the adapters alone; else they are worked into copies of their base, and
            every agent's folder is a whole model.

    Returns:
        which iteration it was, and the agents' folders.

    Raises:
        ConfigError: the folder is there already, nothing is published, or there are no adapters.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not")
    job = plan(project, config).job
    if adapters and job.config.training.lora is None:
        raise ConfigError("--adapters belongs to runs with team.lora; these policies are whole models")
    number = _published(job, iteration)
    team = policy(job, number)
    (save_team if adapters else save_merged)(team, folder)
    return number, [folder / f"{AGENT_PREFIX}{agent.index}" for agent in team.agents]


def _published(job: Job, iteration: int | None) -> int:
    """The iteration that was asked for, or the newest. Raises `ConfigError` where it is not there."""
    store = job.store
    published = [n for n in range(job.config.num_iterations + 1) if store.has(n)]
    if not published:
        raise ConfigError(f"{store.models} holds no policies yet; `comlrl run` trains them")
    number = published[-1] if iteration is None else iteration
    if number not in published:
        raise ConfigError(f"iteration {number} is not there; {store.models} holds {', '.join(map(str, published))}")
    return number
