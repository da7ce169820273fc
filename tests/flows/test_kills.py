"""SIGKILL, which no process can answer: what is left behind, and what the next start makes of it. By real commands."""

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.endurance]

SECONDS = 10.0  # what a killed command started must be gone by then


@pytest.fixture(scope="module")
def fresh(shell: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has not run yet."""
    return Path(shell.project(tmp_path_factory.mktemp("fresh") / "project"))


@pytest.fixture(scope="module")
def unbroken(shell: Any, fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The results of a run that nothing interrupted."""
    project = copied(fresh, tmp_path_factory.mktemp("unbroken"))
    shell.run(project, "comlrl", "run", "--plain")
    return dict(shell.results(project))


def copied(fresh: Path, to: Path) -> Path:
    return Path(shutil.copytree(fresh, to / "project"))


def kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to that process alone, not to what it started."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def prefect_states(project: Path, table: str) -> list[tuple[str, str]]:
    """Names and state types in Prefect's own database, oldest first."""
    with closing(sqlite3.connect(project / ".comlrl" / "prefect" / "prefect.db")) as connection:
        return list(connection.execute(f"SELECT name, state_type FROM {table} ORDER BY created"))


def check_mlflow(project: Path) -> None:
    """One parent run, the killed attempt KILLED beside the one that finished, and every step once."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{project / '.comlrl' / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("comlrl")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    attempts = [(run.info.run_name, run.info.status) for run in runs if run is not parent]
    assert parent.info.status == "FINISHED"
    assert attempts == [("iteration-0001", "FINISHED"), ("iteration-0002", "KILLED"), ("iteration-0002", "FINISHED")]
    assert {"eval/reward_mean", "train/loss", "preference/margin"} <= parent.data.metrics.keys()
    for name in parent.data.metrics:
        steps = [point.step for point in client.get_metric_history(parent.info.run_id, name)]
        assert len(steps) == len(set(steps)), name
        if name == "eval/reward_mean":
            assert len(steps) == 3


def test_a_killed_run_is_set_right_by_the_next_one(
    shell: Any, fresh: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    """Killed in the middle of iteration 2. Meanwhile a second writer is told who is there, and touches nothing."""
    project = copied(fresh, tmp_path)
    first = shell.start(project, "comlrl", "run")
    shell.wait(lambda: shell.finished(project, "prepare", 1) or shell.finished(project, "score", 1), 180, project)
    said = shell.run(project, "comlrl", "run", code=2)
    assert said.startswith(f"error: {project} is in use by process {first.pid} (comlrl run, since 20")
    assert "Traceback" not in said and len(said.splitlines()) == 1
    shell.wait(lambda: shell.finished(project, "score", 2), 120, project)
    kill(first)
    assert shell.left(project, SECONDS) == []
    killed = prefect_states(project, "flow_run")
    assert [state for _, state in killed] == ["RUNNING", "COMPLETED", "RUNNING"]

    output = shell.run(project, "comlrl", "run")
    assert "set to Crashed" in output and "Traceback" not in output
    assert "iterate@0001 is up to date" in output
    assert "answers of chunk 0 are there already" in output  # the finished steps of iteration 2 are not repeated
    assert shell.results(project) == unbroken
    assert shell.left(project, SECONDS) == []
    states = prefect_states(project, "flow_run")
    assert [state for _, state in states] == ["CRASHED", "COMPLETED", "CRASHED", "COMPLETED", "COMPLETED"]
    tasks = Counter(state for _, state in prefect_states(project, "task_run"))
    assert set(tasks) <= {"COMPLETED", "CRASHED"}
    check_mlflow(project)
    assert shell.repro(project) == []


def stage_of(shell: Any, project: Path) -> list[psutil.Process]:
    return [p for p in shell.processes(project) if {"stage", "iterate"} <= set(p.info["cmdline"])]


@pytest.mark.parametrize("moment", ["while its stage imports", "while its stage works"])
@pytest.mark.parametrize("command", [("dvc", "repro"), ("comlrl", "repro")], ids=["dvc", "comlrl-repro"])
def test_a_killed_dvc_leaves_its_stage_running(
    shell: Any, fresh: Path, unbroken: dict[str, bytes], tmp_path: Path, command: tuple[str, ...], moment: str
) -> None:
    """The stage ends by itself, so the next start never meets a second writer."""
    project = copied(fresh, tmp_path)
    first = shell.start(project, *command)
    shell.wait(lambda: stage_of(shell, project), 180, project)
    if "works" in moment:
        shell.wait(lambda: shell.finished(project, "collect", 1), 60, project)
    kill(first)
    assert shell.left(project, SECONDS) == []
    assert shell.repro(project, *command)[0] == "iterate@0001"
    assert shell.results(project) == unbroken
    assert shell.repro(project) == []


@pytest.fixture(scope="module")
def on_two_processes(shell: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A project whose iteration runs on two processes, and the results of a run that nothing interrupted."""
    fresh = shell.project(tmp_path_factory.mktemp("two") / "project", 1, kind="deepspeed", nproc="2")
    project = copied(fresh, tmp_path_factory.mktemp("two_unbroken"))
    shell.run(project, "comlrl", "run", "--plain")
    return fresh, dict(shell.results(project))


@pytest.mark.parametrize("victim", ["rank", "launcher", "flow"])
def test_what_is_killed_of_a_run_on_two_processes(
    shell: Any, on_two_processes: tuple[Path, dict[str, bytes]], tmp_path: Path, victim: str
) -> None:
    """In the middle of its update. A rank or the launcher: the run says so and ends. Then the same command goes on."""
    fresh, unbroken = on_two_processes
    project = copied(fresh, tmp_path)
    flow = shell.start(project, "comlrl", "run", "--plain")

    def ranks() -> list[Path]:
        return sorted((project / ".comlrl").rglob("update-*/rank_*.json"))

    shell.wait(lambda: len(ranks()) == 2, 180, project)
    rank = psutil.Process(json.loads(ranks()[1].read_text())["pid"])
    {"rank": rank, "launcher": rank.parents()[0], "flow": psutil.Process(flow.pid)}[victim].kill()
    code = flow.wait(30)  # a dead process is noticed by then
    assert shell.left(project, SECONDS) == []
    if victim != "flow":
        log = (project.parent / "log.txt").read_text()
        assert code == 2 and "finished steps are kept" in log and "Traceback" not in log, log
        assert "signal 9" in log
    output = shell.run(project, "comlrl", "run", "--plain")
    assert "answers of chunk 0 are there already" in output
    assert shell.results(project) == unbroken
    assert shell.left(project, SECONDS) == []


@contextmanager
def served(shell: Any, project: Path, port: int) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client, str]]:
    """`comlrl serve`, a client of its API, and the id of the deployment; killed with all its children at the end."""
    pages = free_port()
    process = shell.start(project, "comlrl", "serve", "--port", str(port), "--mlflow-port", str(pages))
    path = "/deployments/name/preference-training/preference-training"
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=20, trust_env=False) as client:

            def ready() -> str:
                if "-> Run)" not in (project.parent / "log.txt").read_text():
                    return ""
                try:
                    answer = client.get(path)
                except httpx.HTTPError:
                    return ""
                return str(answer.json()["id"]) if answer.is_success else ""

            deployment = shell.wait(ready, 150, project)
            assert "MLflow" in httpx.get(f"http://127.0.0.1:{pages}/", timeout=20, trust_env=False).text
            yield process, client, deployment
    finally:
        for left in shell.processes(project):
            left.kill()
        process.wait()


def submit(client: httpx.Client, deployment: str) -> str:
    answer = client.post(f"/deployments/{deployment}/create_flow_run", json={})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def state(client: httpx.Client, run: str) -> str:
    return str(client.get(f"/flow_runs/{run}").json()["state"]["type"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_killed_before_its_run_has_begun(shell: Any, fresh: Path, tmp_path: Path) -> None:
    """The run was taken and is Pending: no process of its own had noted it. The next server sets it to Crashed."""
    project, port = copied(fresh, tmp_path), free_port()
    with served(shell, project, port) as (process, client, deployment):
        lost = submit(client, deployment)
        shell.wait(lambda: state(client, lost) == "PENDING", 60, project)
        kill(process)
        assert shell.left(project, 60.0) == []
    assert prefect_states(project, "flow_run")[0][1] == "PENDING"
    (project.parent / "log.txt").unlink()
    with served(shell, project, port) as (_, client, deployment):
        assert state(client, lost) == "CRASHED"
        again = submit(client, deployment)
        shell.wait(lambda: state(client, again) == "RUNNING", 120, project)  # the place is free


def test_a_killed_server_leaves_its_run_holding_the_only_place(
    shell: Any, fresh: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    """The run ends by itself; the next `comlrl serve` sets it to Crashed, so that the deployment's place is free."""
    project, port = copied(fresh, tmp_path), free_port()
    with served(shell, project, port) as (process, client, deployment):
        lost = submit(client, deployment)
        shell.wait(lambda: shell.finished(project, "score", 1), 180, project)
        kill(process)
        assert shell.left(project, SECONDS) == []
    (project.parent / "log.txt").unlink()
    with served(shell, project, port) as (process, client, deployment):
        assert state(client, lost) == "CRASHED"
        again = submit(client, deployment)
        shell.wait(lambda: state(client, again) in ("COMPLETED", "FAILED", "CRASHED"), 120, project)
        assert state(client, again) == "COMPLETED"
        assert shell.results(project) == unbroken

        # A run at the keyboard uses the server that answers, and leaves it alone.
        count = client.post("/flow_runs/count", json={}).json()
        output = shell.run(project, "comlrl", "run")
        assert "everything is up to date" in output
        assert client.post("/flow_runs/count", json={}).json() == count + 1
        servers = [p for p in shell.processes(project) if {"prefect", "server", "start"} <= set(p.info["cmdline"])]
        assert len(servers) <= 1 and process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert shell.left(project, SECONDS) == []
