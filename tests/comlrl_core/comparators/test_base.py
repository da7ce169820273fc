"""A comparator lets go of what was made for it, and of nothing else."""

import gc
import weakref

from comlrl_core.comparators.base import Comparator


def test_a_team_of_its_own_is_released_with_its_memory(team) -> None:
    comparator = Comparator(policy="model", team=team.copy(), version="x")
    weights = weakref.ref(comparator.team.models[0])
    comparator.release()
    gc.collect()
    assert comparator.team is None and weights() is None


def test_a_team_of_somebody_else_stays(team) -> None:
    comparator = Comparator(policy="current", team=team, version="x", owned=False)
    comparator.release()
    assert comparator.team is team
