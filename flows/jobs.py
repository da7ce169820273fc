"""From a project and settings to a job: where it works, and whether its results are the project's own."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_core.config.files import dump_yaml, read_params
from comlrl_core.config.run import RunConfig, chains
from comlrl_core.errors import ConfigError
from comlrl_core.files import atomic_write_text
from comlrl_core.rewards.loading import source_file
from flows import pipeline
from flows.package_lock import check_lock, package_digest, write_lock
from flows.project import Project
from tasks.job import BUILTIN_TRANSITIONS, Job, run_key

logger = logging.getLogger("comlrl_core.stages")

RUNS = "runs"


@dataclass(frozen=True)
class Plan:
    """A job, the project that it belongs to, and the folder that it works in.

    `tracked`: the settings are those of `params.yaml` and DVC keeps the project, so finished stages are recorded.
    """

    job: Job
    project: Project
    place: Project
    tracked: bool


def plan(project: Project, config: RunConfig) -> Plan:
    """Decide where `config` runs: with the settings of `params.yaml` in the project itself, else in `runs/<key>`."""
    mine = read_params(project.params).run_config() if project.params.is_file() else None
    own = mine is not None and _results(mine) == _results(config) and config.num_iterations <= mine.num_iterations
    if own and mine is not None:
        if config.num_iterations < mine.num_iterations:
            logger.info("params.yaml has %d iterations: the run goes to its end", mine.num_iterations)
        config = RunConfig.model_validate(
            {**mine.values(), "tracking": config.tracking.model_dump(), "engine": config.engine.model_dump()}
        )
    work_root = project.work_root if own else project.work_root / RUNS / run_key(config)
    job = Job(source_root=project.work_root, work_root=work_root, config=config, code=package_digest())
    tracked = own and pipeline.is_tracked(project.work_root)
    return Plan(job, project, Project.at(work_root), tracked)


def lengthened(project: Project, config: RunConfig, count: int) -> RunConfig:
    """The project's settings with `count` more iterations, written to its `params.yaml`."""
    if count < 0:
        raise ConfigError(f"add_iterations must be 0 or more, not {count}")
    mine = read_params(project.params).run_config()
    if _results(mine) != _results(config):
        raise ConfigError("add_iterations goes with the settings of params.yaml alone; these differ from it")
    with project.run_lock("add iterations"):
        pipeline.set_iterations(project.params, mine.num_iterations + count)
    return read_params(project.params).run_config()


def open_place(planned: Plan) -> None:
    """Make the working folder ready: its settings file, or the project's lock file and dependencies."""
    if planned.tracked:
        write_lock(planned.project.work_root)
        pipeline.sync_dependencies(planned.project.dvc_yaml, user_files(planned.job))
    elif planned.job.work_root != planned.project.work_root:
        planned.job.work_root.mkdir(parents=True, exist_ok=True)
        atomic_write_text(planned.place.params, params_text(planned.job.config))
        logger.info("the settings differ from params.yaml: this run works in %s", planned.job.work_root)


def check_stage(job: Job, project: Project) -> None:
    """Refuse a DVC stage whose recorded dependencies would not be what it really uses."""
    problem = check_lock(project.work_root)
    if problem:
        raise ConfigError(
            f"{problem}; start the pipeline with `comlrl repro` (or `comlrl init`), which brings it up to date"
        )
    missing = pipeline.missing_dependencies(project.dvc_yaml, user_files(job))
    for stage, files in missing.items():
        raise ConfigError(
            f"{project.dvc_yaml}: stage {stage} does not depend on {', '.join(files)}, which the settings use; "
            "`comlrl repro` "
            "(or `comlrl init`) adds it"
        )


def user_files(job: Job) -> dict[str, list[Path]]:
    """The user's own files behind the settings, per DVC stage: reward code, formatters, local models, task files."""
    root, config = job.source_root, job.config
    formatter = [source_file(config.team.formatter, root)] if config.team.formatter else []
    reward = [source_file(spec, root) for spec in (config.reward.function, config.reward.processor) if spec]
    models = [root / name for name in config.team.agents or [config.team.agent_model or ""] if (root / name).is_dir()]
    tasks = [root / name.partition("[")[0] for name in (config.tasks.train, config.tasks.eval) if name]
    further = [root / name for name in config.further_models()]
    spec = config.tasks.transition
    between = [source_file(spec, root)] if spec and spec not in BUILTIN_TRANSITIONS else []
    learning = "train" if config.learns_from_rewards() else "iterate"
    return {
        "prepare": _existing([*formatter, *models, *tasks]),
        learning: _existing([*formatter, *reward, *between, *further]),
        "evaluate": _existing([*formatter, *reward, *between]),
    }


def _existing(paths: list[Path | None]) -> list[Path]:
    return [path for path in dict.fromkeys(paths) if path is not None and path.exists()]


def params_text(config: RunConfig) -> str:
    """Settings as a parameter file that DVC and `comlrl` can read."""
    return dump_yaml({**config.values(), **chains(config)})


def _results(config: RunConfig) -> dict[str, Any]:
    """The settings that decide what a run writes into its folder, without its length."""
    values = config.values()
    for name in ("tracking", "num_iterations", "engine"):
        values.pop(name)
    return values | config.engine.identity()
