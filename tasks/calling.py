"""Tasks that also run without Prefect: `call(task, ...)` is a task run inside a flow run and a plain call
elsewhere.
"""

from collections.abc import Callable
from typing import Any

from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

# Training and file steps are not retried: what failed once fails again, and finished steps are kept anyway.
OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


def orchestrated() -> bool:
    """Whether this code runs inside a Prefect flow run."""
    return FlowRunContext.get() is not None


def call(step: "Task[..., Any] | Flow[..., Any]", *args: Any, **kwargs: Any) -> Any:
    """Run `step` as a Prefect task or subflow inside a flow run, else as the plain function that it wraps."""
    function: Callable[..., Any] = step if orchestrated() else step.fn
    return function(*args, **kwargs)
