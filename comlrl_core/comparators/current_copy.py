"""`current_copy`: a frozen copy of the live team, made once per collection, on devices of its own."""

from comlrl_core.comparators.base import Comparator
from comlrl_core.config.fields import Devices
from comlrl_core.team.team import Team


def current_copy(team: Team, devices: Devices) -> Comparator:
    """A copy of `team` as it is now; later updates of `team` do not reach it."""
    return Comparator(policy="current_copy", team=team.copy(devices), version="current")
