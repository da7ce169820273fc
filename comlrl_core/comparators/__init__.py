"""The other side of each comparison: one file per `comparator_policy`."""

from comlrl_core.comparators.base import Comparator
from comlrl_core.comparators.opening import open_comparator

__all__ = ["Comparator", "open_comparator"]
