"""`history`: the team as it was some iterations ago, loaded once per collection."""

from collections.abc import Callable

from comlrl_core.comparators.base import Comparator
from comlrl_core.team.team import Team


def history_index(iteration: int, k: int | None) -> int:
    """Which iteration's policies answer in `iteration`: `iteration - 1 - k` (k = 1 by default), at least 0.

    `models/iteration_{n-1}` is the current team, so `k = 1` is the one before it; 0 is the initial team.
    """
    return max(0, iteration - 1 - (k if k is not None else 1))


def history(iteration: int, k: int | None, load_policy: Callable[[int], Team]) -> Comparator:
    """The team of iteration `history_index(iteration, k)`."""
    index = history_index(iteration, k)
    return Comparator(policy="history", team=load_policy(index), version=f"iteration_{index:04d}")
