"""Tasks that also run without Prefect: `call(task, ...)` is a task run inside a flow run and a plain call
elsewhere. The seconds of stages are noted here, whichever it is.
"""

from collections.abc import Callable
from typing import Any

from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from tasks.job import Job
from tasks.timing import timed

# Training and file steps are not retried: what failed once fails again, and finished steps are kept anyway.
OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


def orchestrated() -> bool:
    """Whether this code runs inside a Prefect flow run."""
    return FlowRunContext.get() is not None


def call(step: "Task[..., Any] | Flow[..., Any]", *args: Any, **kwargs: Any) -> Any:
    """Run `step` as a Prefect task or subflow inside a flow run, else as the plain function that it wraps."""
    function: Callable[..., Any] = step if orchestrated() else step.fn
    if not (isinstance(step, Task) and args and isinstance(args[0], Job)):  # a subflow's seconds are its tasks'
        return function(*args, **kwargs)
    with timed(args[0], step.name, _iteration(args)):
        return function(*args, **kwargs)


def _iteration(args: tuple[Any, ...]) -> int | None:
    """The iteration that a stage's arguments name: `stage(job, iteration, ...)`; None if it names none."""
    return args[1] if len(args) > 1 and isinstance(args[1], int) else None
