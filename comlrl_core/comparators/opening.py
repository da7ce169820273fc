"""From settings to the comparator of one collection."""

from collections.abc import Callable, Sequence

from comlrl_core.comparators.base import Comparator
from comlrl_core.comparators.current import current
from comlrl_core.comparators.current_copy import current_copy
from comlrl_core.comparators.history import history
from comlrl_core.comparators.model import model
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.errors import ConfigError
from comlrl_core.team.team import Team


def open_comparator(
    settings: ComparatorFields,
    team: Team,
    iteration: int,
    load_policy: Callable[[int], Team],
    load_models: Callable[[Sequence[str]], Team],
) -> Comparator:
    """The other side for `iteration`.

    Args:
        settings: the `comparator_*` settings.
        team: the live team.
        iteration: number of the iteration that collects, from 1.
        load_policy: loads the team that an earlier iteration left behind (0 = the initial team).
        load_models: loads models by name or folder, one per role, with the live team's formatters.
    """
    if settings.comparator_policy == "current":
        return current(team)
    if settings.comparator_policy == "current_copy":
        return current_copy(team, settings.comparator_devices)
    if settings.comparator_policy == "history":
        return history(iteration, settings.comparator_history_k, load_policy)
    return model(comparator_sources(settings, team.num_agents), load_models)


def comparator_sources(settings: ComparatorFields, num_agents: int) -> list[str]:
    """The model of each role under `comparator_policy: model`."""
    sources = settings.comparator_agents or [settings.comparator_model_name or ""] * num_agents
    if len(sources) != num_agents:
        raise ConfigError(
            f"comparator_agents lists {len(sources)} models for {num_agents} agents; give one per agent, or "
            "comparator_model_name for all"
        )
    return sources
