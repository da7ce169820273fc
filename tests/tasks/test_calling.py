import os
import subprocess
import sys
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import flows.iteration
from tasks import collect, evaluate, pair, prepare, sample, score, update
from tasks.calling import OPTIONS, call, orchestrated

FLOW = """
from prefect import flow, task
from tasks.calling import OPTIONS, call, orchestrated

@task(**OPTIONS)
def inner(x):
    from prefect.runtime import task_run
    return x + 1, orchestrated(), bool(task_run.id)

@flow
def outer():
    return call(inner, 1)

print(outer(), orchestrated())
"""


@task(**OPTIONS)
def add(first: int, second: int = 1) -> int:
    return first + second


@flow
def add_flow(first: int) -> int:
    return first + 10


def test_outside_of_a_flow_run_steps_are_plain_calls() -> None:
    assert not orchestrated()
    assert call(add, 1) == 2
    assert call(add, 1, second=2) == 3
    assert call(add_flow, 1) == 11


def test_no_stage_is_cached_kept_or_repeated_by_prefect() -> None:
    """DVC says what is up to date; and what failed once in training fails again."""
    stages = (
        *(collect.collect, score.score, pair.pair, sample.sample, update.update, update.publish),
        *(prepare.prepare, evaluate.evaluate_iteration, evaluate.summarize_run),
    )
    for stage in stages:
        assert stage.cache_policy == NO_CACHE, stage.name
        assert stage.persist_result is False, stage.name
        assert stage.retries == 0, stage.name
    assert flows.iteration.iterate.name == "iteration"


def test_inside_a_flow_run_steps_are_task_runs(tmp_path: Path) -> None:
    """In a process of its own, with a stand-in for the API: a flow run context is all that decides."""
    code = FLOW.replace("print(outer(), orchestrated())", "") + (
        "from unittest.mock import patch\n"
        "with patch('tasks.calling.FlowRunContext.get', return_value=object()), patch.object(inner, 'fn') as plain:\n"
        "    with patch.object(type(inner), '__call__', lambda self, x: ('task run', x)):\n"
        "        print(orchestrated(), call(inner, 1), plain.called)\n"
    )
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split("\n")[0] == "True ('task run', 1) False"
