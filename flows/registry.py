"""Which processes run which flow runs, so that the runs of a killed process do not stay "Running" for ever.

`.comlrl/pids.json` holds one entry per training process: pid, start time and the ids of its flow runs. A process
removes its entry when it ends; an entry whose process is gone belongs to one that was killed, and the next start sets
its runs right. A process that serves the deployments has an entry too: runs that it had taken, and whose own process
had not begun yet, have nobody when it is killed.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from comlrl_core.files import write_json
from flows.project import Project
from tasks.calling import orchestrated

logger = logging.getLogger("comlrl_core.stages")

Entry = dict[str, Any]


@contextmanager
def registered(project: Project) -> Iterator[None]:
    """Keep this process's entry, with the current flow run, while the block runs; outside a flow run do nothing."""
    if not orchestrated():
        yield
        return
    from prefect.runtime import flow_run

    with _entries(project) as entries:
        mine = _mine(entries)
        mine["flow_runs"].append(str(flow_run.id))
    try:
        yield
    finally:
        with _entries(project) as entries:
            mine = _mine(entries)
            mine["flow_runs"].remove(str(flow_run.id))
            if not mine["flow_runs"]:
                entries.remove(mine)


@contextmanager
def serving(project: Project) -> Iterator[None]:
    """Keep an entry that says that this process serves the project's deployments, while the block runs."""
    with _entries(project) as entries:
        _mine(entries)["serves"] = True
    try:
        yield
    finally:
        with _entries(project) as entries:
            entries.remove(_mine(entries))


def repair(project: Project, *, before_serving: bool = False) -> int:
    """Set the flow runs of processes that are gone to Crashed; needs a Prefect API. Returns how many there were.

    A run that an API does not know or calls finished is let be. No failure of the API stops the caller. Runs of the
    deployments that never got a process are looked for where the process that served them was killed, and always
    with `before_serving`.
    """
    with _entries(project) as entries:
        living = [entry for entry in entries if _lives(entry)]
        dead = [entry for entry in entries if entry not in living]
    lost = [(run, entry) for entry in dead for run in reversed(entry["flow_runs"])]
    unserved = not any(entry.get("serves") for entry in living)
    look = unserved and (before_serving or any(entry.get("serves") for entry in dead))
    found = 0
    if lost or look:
        from prefect.client.orchestration import get_client

        try:
            with get_client(sync_client=True) as client:
                for run, entry in lost:
                    _crash(client, run, f"process {entry['pid']} ended without a word; finished steps are kept")
                if look:
                    orphans = _orphans(client, project, {run for entry in living for run in entry["flow_runs"]})
                    for run in orphans:
                        _crash(client, run, "what served it ended before it began")
                    found = len(orphans)
        except Exception as error:  # the entries stay: the next start tries again
            logger.warning("flow runs of ended processes could not be set to Crashed: %s", error)
            return 0
    if dead:
        with _entries(project) as entries:
            entries[:] = [entry for entry in entries if entry not in dead]
    return len(lost) + found


def _orphans(client: Any, project: Project, living: set[str]) -> list[str]:
    """Runs of this project's deployments that are called under way and have no process; call it where nobody serves."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    under_way = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=under_way)))
    mine = str(project.work_root)
    return [
        str(run.id)
        for run in runs
        if run.deployment_id and run.parameters.get("project") == mine and str(run.id) not in living
    ]


def _crash(client: Any, flow_run_id: str, message: str) -> None:
    from uuid import UUID

    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    try:
        run = client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:  # another server, or its database was removed
        return
    if run.state is not None and run.state.is_final():
        return
    parent = FlowRunFilterParentFlowRunId(any_=[run.id])
    for child in client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent)):
        _crash(client, str(child.id), message)
    for task_run in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))):
        if task_run.state is None or not task_run.state.is_final():
            client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
    client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    logger.warning("flow run %r was left behind by a process that is gone: set to Crashed", run.name)


def _mine(entries: list[Entry]) -> Entry:
    """This process's entry; made if it is not there."""
    process = psutil.Process()
    for entry in entries:
        if entry["pid"] == process.pid and _lives(entry):
            return entry
    made: Entry = {"pid": process.pid, "created": process.create_time(), "flow_runs": []}
    entries.append(made)
    return made


def _lives(entry: Entry) -> bool:
    try:
        process = psutil.Process(entry["pid"])
        return abs(process.create_time() - entry["created"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def _entries(project: Project) -> Iterator[list[Entry]]:
    """The entries, to be changed in place; written back at the end, one process at a time."""
    path = project.state_root / "pids.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _read(path)
        before = json.dumps(entries)
        yield entries
        if json.dumps(entries) != before:
            write_json(path, entries)
    finally:
        os.close(lock)


def _read(path: Path) -> list[Entry]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return entries if isinstance(entries, list) else []
