"""`current`: the live team, with a random stream of its own."""

from comlrl_core.comparators.base import Comparator
from comlrl_core.team.team import Team


def current(team: Team) -> Comparator:
    """The team in training answers on both sides."""
    return Comparator(policy="current", team=team, version="current", owned=False)
