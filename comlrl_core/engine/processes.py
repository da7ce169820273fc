"""Several processes that train together: who this one is, what is its share, and how results come together.

Every process runs the same program on the same data; work on lists of independent items is shared out, and the results
are put together in the items' own order, so the program goes on as if it had been alone. Outside a process group all
of this does nothing.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_TIMEOUT = 1800.0  # seconds; torch's own for gloo


def joined() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def join(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Become a member of the process group that the launcher's environment names, or of a group of one.

    `timeout`: seconds after which waiting for the others ends with an error. A second call does nothing.
    """
    if joined():
        return
    gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=limit)
        return
    # Without a port: two runs side by side cannot meet by accident.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def leave() -> None:
    """Leave the process group, if there is one."""
    if joined():
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if joined() else 0


def world_size() -> int:
    """How many processes work together."""
    return dist.get_world_size() if joined() else 1


def is_first() -> bool:
    """Whether this process writes files and talks to people."""
    return rank() == 0


def share(items: Sequence[Item]) -> list[Item]:
    """Every `world_size`-th item, from this process's number on; together the processes have each item once."""
    return list(items[rank() :: world_size()])


def even_share(items: Sequence[Item]) -> list[tuple[Item, bool]]:
    """This process's items, filled up to the same number in every process.

    Sharded models need the same number of passes everywhere. True means an item of one's own, False a filler (any of
    the items), whose result must count for nothing. Without items: none anywhere.
    """
    own = [(item, True) for item in share(items)]
    size = -(-len(items) // world_size())
    return own + [(item, False) for item in items[: size - len(own)]]


def put_together(own: Sequence[Result], count: int) -> list[Result]:
    """The results of all `count` items in their order, from each process's results of its `share`."""
    if world_size() == 1:
        return list(own)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, list(own))
    return [parts[index % len(parts)][index // len(parts)] for index in range(count)]


def map_shared(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`function` of every item, each computed by one process."""
    return put_together([function(item) for item in share(items)], len(items))


def total(value: float) -> float:
    """The sum of `value` over the processes (fp64, in the processes' order, so equal everywhere)."""
    if world_size() == 1:
        return value
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, value)
    return float(sum(parts))


def anywhere(value: bool) -> bool:
    """Whether `value` is true in some process."""
    return total(float(value)) > 0


def by_first(function: Callable[[], Result]) -> Result:
    """The result of `function`, called in the first process alone; its error is raised in all of them."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome = [function(), None]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def wait_for_all() -> None:
    """Go on when every process has come here."""
    if world_size() > 1:
        dist.barrier()


def gather_rows(own: Tensor, mine: Sequence[bool], count: int) -> Tensor:
    """Rows `[count, ...]` of all items in their order, from each process's rows of its `even_share`, on the CPU.

    `mine`: False for the rows of fillers.
    """
    if world_size() == 1:
        return own
    rows = put_together([row for row, counts in zip(own.cpu(), mine, strict=True) if counts], count)
    return torch.stack(rows)
