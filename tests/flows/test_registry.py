"""Against a stand-in for Prefect's API; the same with a real server is in test_kills.py."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.exceptions import ObjectNotFound

from flows import registry
from flows.project import Project
from flows.registry import registered, repair, serving


class Run(SimpleNamespace):
    """A flow or task run with a state that knows whether it is final."""

    def __init__(self, state: str, parent: UUID | None = None, flow: UUID | None = None, **more: Any) -> None:
        more = {"deployment_id": None, "parameters": {}, **more}
        super().__init__(id=uuid4(), name=f"run-{state}", parent=parent, flow=flow, **more)
        self.set(state)

    def set(self, name: str) -> None:
        self.state = SimpleNamespace(name=name, is_final=lambda: name in ("Completed", "Failed", "Crashed"))


class API:
    """The calls of Prefect's client that `repair` makes."""

    def __init__(self) -> None:
        self.flow_runs: list[Run] = []
        self.task_runs: list[Run] = []
        self.error: Exception | None = None

    def flow(self, state: str, parent: Run | None = None, **more: Any) -> Run:
        self.flow_runs.append(Run(state, parent.id if parent else None, **more))
        return self.flow_runs[-1]

    def task(self, state: str, flow: Run) -> Run:
        self.task_runs.append(Run(state, flow=flow.id))
        return self.task_runs[-1]

    def read_flow_run(self, run_id: UUID) -> Run:
        if self.error:
            raise self.error
        for run in self.flow_runs:
            if run.id == run_id:
                return run
        raise ObjectNotFound(http_exc=Exception("404"))

    def read_flow_runs(self, flow_run_filter: Any) -> list[Run]:
        if flow_run_filter.state is not None:
            states = [state.value.capitalize() for state in flow_run_filter.state.type.any_]
            return [run for run in self.flow_runs if run.state.name in states]
        wanted = flow_run_filter.parent_flow_run_id.any_
        return [run for run in self.flow_runs if run.parent in wanted]

    def read_task_runs(self, flow_run_filter: Any) -> list[Run]:
        return [run for run in self.task_runs if run.flow in flow_run_filter.id.any_]

    def set_flow_run_state(self, run_id: UUID, state: Any, force: bool) -> None:
        assert force
        self.read_flow_run(run_id).set(state.name)

    def set_task_run_state(self, run_id: UUID, state: Any, force: bool) -> None:
        assert force
        next(run for run in self.task_runs if run.id == run_id).set(state.name)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> API:
    made = API()

    @contextmanager
    def get_client(sync_client: bool) -> Iterator[API]:
        assert sync_client
        yield made

    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    return made


@pytest.fixture
def project(tmp_path: Path, own_environment: None) -> Project:
    return Project.at(tmp_path)


def entries(project: Project) -> list[Any]:
    file = project.state_root / "pids.json"
    return json.loads(file.read_text()) if file.is_file() else []


def leave_behind(project: Project, *runs: Run | str, pid: int | None = None, created: float = 0.0) -> None:
    """What a process leaves in the registry that was killed while it ran `runs`."""
    if pid is None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pid = ended.pid
    ids = [run if isinstance(run, str) else str(run.id) for run in runs]
    project.state_root.mkdir(exist_ok=True)
    entry = {"pid": pid, "created": created, "flow_runs": ids}
    (project.state_root / "pids.json").write_text(json.dumps([*entries(project), entry]))


def test_a_killed_worker_leaves_a_flow_running_for_ever(project: Project, api: API) -> None:
    """At the next start the flow run, its subflow and the unfinished task runs of both are set to Crashed."""
    run = api.flow("Running")
    before, during = api.flow("Completed", run), api.flow("Running", run)
    done, doing, waiting = api.task("Completed", during), api.task("Running", during), api.task("Pending", run)
    leave_behind(project, run)
    assert repair(project) == 1
    assert [entry.state.name for entry in (run, during, doing, waiting)] == ["Crashed"] * 4
    assert [entry.state.name for entry in (before, done)] == ["Completed"] * 2
    assert entries(project) == []
    assert repair(project) == 0


def test_the_runs_of_a_living_process_are_let_be(project: Project, api: API) -> None:
    run = api.flow("Running")
    leave_behind(project, run, pid=os.getpid(), created=psutil.Process().create_time())
    assert repair(project) == 0
    assert run.state.name == "Running" and len(entries(project)) == 1


def test_another_process_with_the_same_number_is_not_the_one_that_was_killed(project: Project, api: API) -> None:
    run = api.flow("Running")
    leave_behind(project, run, pid=os.getpid(), created=1.0)
    assert repair(project) == 1
    assert run.state.name == "Crashed"


def test_what_ended_by_itself_keeps_its_state(project: Project, api: API) -> None:
    run = api.flow("Failed")
    leave_behind(project, run)
    repair(project)
    assert run.state.name == "Failed" and entries(project) == []


def test_a_run_that_the_api_does_not_know_is_forgotten(project: Project, api: API) -> None:
    run = api.flow("Running")
    leave_behind(project, str(uuid4()), run)
    repair(project)
    assert run.state.name == "Crashed" and entries(project) == []


def served_runs(project: Project, api: API) -> dict[str, Run]:
    """Flow runs as a killed `comlrl serve` may leave them, and others beside them."""
    mine = {"deployment_id": uuid4(), "parameters": {"project": str(project.work_root)}}
    other = {"deployment_id": uuid4(), "parameters": {"project": "/somewhere/else"}}
    return {
        "taken": api.flow("Pending", **mine),
        "begun": api.flow("Running", **mine),
        "waiting": api.flow("Scheduled", **mine),
        "another project's": api.flow("Pending", **other),
        "typed": api.flow("Running", parameters={"project": str(project.work_root)}),
    }


def test_a_run_that_was_killed_before_it_began_does_not_stay_pending(project: Project, api: API) -> None:
    """Its server was killed between taking it and its first words: no entry names it."""
    runs = served_runs(project, api)
    leave_behind(project)
    file = project.state_root / "pids.json"
    file.write_text(json.dumps([{**entry, "serves": True} for entry in entries(project)]))
    assert repair(project) == 2
    states = {name: run.state.name for name, run in runs.items()}
    assert states == {
        "taken": "Crashed", "begun": "Crashed", "waiting": "Scheduled", "another project's": "Pending",
        "typed": "Running",
    }  # fmt: skip
    assert entries(project) == []


def test_the_next_server_looks_even_where_nothing_was_noted(project: Project, api: API) -> None:
    runs = served_runs(project, api)
    leave_behind(project, runs["begun"], pid=os.getpid(), created=psutil.Process().create_time())  # it goes on
    assert repair(project) == 0
    assert repair(project, before_serving=True) == 1
    assert (runs["taken"].state.name, runs["begun"].state.name) == ("Crashed", "Running")


def test_what_a_living_server_has_taken_is_let_be(project: Project, api: API) -> None:
    runs = served_runs(project, api)
    leave_behind(project)
    with serving(project):
        assert [entry.get("serves") for entry in entries(project)] == [None, True]
        assert repair(project, before_serving=True) == 0
    assert runs["taken"].state.name == "Pending"
    assert entries(project) == []


def test_an_api_that_fails_stops_nothing_and_is_asked_again(
    project: Project, api: API, caplog: pytest.LogCaptureFixture
) -> None:
    run = api.flow("Running")
    leave_behind(project, run)
    api.error = ConnectionError("nobody answers")
    assert repair(project) == 0
    assert "nobody answers" in caplog.text and len(entries(project)) == 1
    api.error = None
    assert repair(project) == 1
    assert run.state.name == "Crashed"


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}'])
def test_a_torn_registry_is_an_empty_one(project: Project, api: API, content: str) -> None:
    project.state_root.mkdir()
    (project.state_root / "pids.json").write_text(content)
    assert repair(project) == 0


def test_a_process_is_registered_while_its_flow_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import prefect.runtime

    monkeypatch.setattr(registry, "orchestrated", lambda: True)
    monkeypatch.setattr(prefect.runtime, "flow_run", SimpleNamespace(id="outer"))
    with pytest.raises(RuntimeError), registered(project):
        (entry,) = entries(project)
        assert entry["pid"] == os.getpid() and entry["flow_runs"] == ["outer"]
        with monkeypatch.context() as inner:
            inner.setattr(prefect.runtime, "flow_run", SimpleNamespace(id="inner"))
            with registered(project):
                assert entries(project)[0]["flow_runs"] == ["outer", "inner"]
        assert entries(project)[0]["flow_runs"] == ["outer"]
        raise RuntimeError
    assert entries(project) == []


def test_outside_of_a_flow_run_nothing_is_written(project: Project) -> None:
    with registered(project):
        assert not project.state_root.exists()
