"""`comlrl serve`: the Prefect UI with this project's deployment, and the MLflow UI, until Ctrl-C."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import httpx

from comlrl_core.config.fields import OptimizationFields, SamplingFields
from comlrl_core.config.run import PreferenceRun, RewardRun, RunConfig
from comlrl_core.errors import ComlrlError
from flows.environment import MLFLOW_UI
from flows.prefect_api import HOST, WAIT_SECONDS, die_with_parent, end_group, healthy, write_record
from flows.project import Project
from tasks.tracking_store import database_uri, ensure_database

if TYPE_CHECKING:
    from prefect import Flow

logger = logging.getLogger("comlrl_core.stages")

NIGHTLY = "0 2 * * *"  # the schedule that the deployment offers, switched off
POLL_SECONDS = 2  # how often the served deployment looks for runs; Prefect's own 10 s feel like nothing happens


def serve_project(project: Project, config: RunConfig, port: int, mlflow_port: int) -> None:
    """Serve the deployment of `project`; its form starts from the settings of params.yaml."""
    url = f"http://{HOST}:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", str(POLL_SECONDS))
    ensure_database(project.state_root)
    with ExitStack() as stack:
        if healthy(url):
            print(f"a Prefect server answers at {url} already; it is used")
        else:
            stack.enter_context(_server(project, url, port))
        if mlflow_port:
            stack.enter_context(_mlflow(project, mlflow_port))
            os.environ[MLFLOW_UI] = f"http://{HOST}:{mlflow_port}"  # for the summaries of runs
        _wait(url, "Prefect", project.logs / "prefect-server.log")
        _repair(project)
        if mlflow_port:
            _wait(f"http://{HOST}:{mlflow_port}/health", "MLflow", project.logs / "mlflow-ui.log")
            print(f"MLflow UI:   http://{HOST}:{mlflow_port}   (experiment {config.tracking.experiment})")
        print(
            f"Prefect UI:  http://{HOST}:{port}   (Deployments -> preference-training or reward-training -> Run)",
            flush=True,
        )
        stack.enter_context(_registered(project))
        _serve(project, config)


def _repair(project: Project) -> None:
    """A run that a kill left "Running" would hold the deployment's one place, and no later run could start."""
    from flows.registry import repair

    repair(project, before_serving=True)


def _registered(project: Project) -> AbstractContextManager[None]:
    from flows.registry import serving

    return serving(project)


def _serve(project: Project, config: RunConfig) -> None:
    from prefect import serve
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.deployments.runner import EntrypointType, RunnerDeployment

    from flows.training import preference_training, reward_training

    def deployment(training: "Flow[Any, Any]", run: RunConfig, what: str) -> RunnerDeployment:
        made = training.to_deployment(
            name=training.name,
            description=f"{what}; the form starts from params.yaml.",
            parameters={"settings": run.values(), "project": str(project.work_root)},
            enforce_parameter_schema=True,
            concurrency_limit=1,  # a project has one writer; more runs wait
            schedules=[{"schedule": CronSchedule(cron=NIGHTLY), "active": False}],
            entrypoint_type=EntrypointType.MODULE_PATH,
            tags=["comlrl"],
        )
        assert isinstance(made, RunnerDeployment)  # a coroutine only where an event loop runs
        return made

    serve(
        deployment(preference_training, sibling(config, PreferenceRun), "Train the team from preferences"),
        deployment(reward_training, sibling(config, RewardRun), "Train the team from rewards of its own answers"),
        limit=1,
        pause_on_shutdown=False,
        print_starting_message=False,
    )


def sibling(config: RunConfig, kind: type[RunConfig]) -> RunConfig:
    """`config` itself where it is of `kind`; else a run of `kind` with the same team, tasks, reward and sampling."""
    values = config.values()
    algorithms = get_args(kind.model_fields["algorithm"].annotation)
    if config.algorithm in algorithms:
        return kind.model_validate(values)
    shared = (
        set(OptimizationFields.model_fields) | set(SamplingFields.model_fields) | {"num_agents", "agent_learning_rate"}
    )
    training = {name: value for name, value in values["training"].items() if name in shared}
    training |= {"rollout_buffer_size": config.training.rollout_buffer_size, "num_turns": 1}
    return kind.model_validate({**values, "algorithm": algorithms[0], "training": training})


@contextmanager
def _server(project: Project, url: str, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    environment = {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_SERVER_API_HOST": HOST}
    with _child(command, environment, project.logs / "prefect-server.log") as process:
        write_record(project.state_root, url, process.pid, persistent=True)
        yield


@contextmanager
def _mlflow(project: Project, port: int) -> Iterator[None]:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or database_uri(project.state_root)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    command += ["--workers", "1", "--artifacts-destination", str(project.artifacts)]
    with _child(command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, project.logs / "mlflow-ui.log"):
        yield


@contextmanager
def _child(command: list[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield process
    finally:
        end_group(process)


def _wait(url: str, what: str, log: Path) -> None:
    """Block until `url` answers; a `ComlrlError` names the log where it does not."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if url.endswith("/api"):
            if healthy(url):
                return
        else:
            try:
                if httpx.get(url, timeout=2.0).is_success:
                    return
            except httpx.HTTPError:
                pass
        time.sleep(0.3)
    raise ComlrlError(f"the {what} server did not answer at {url} within {WAIT_SECONDS:g} s; its log is {log}")
