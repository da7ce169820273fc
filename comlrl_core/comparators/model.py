"""`model`: fixed models by name or folder, one for all roles or one per role."""

from collections.abc import Callable, Sequence

from comlrl_core.comparators.base import Comparator
from comlrl_core.team.team import Team


def model(sources: Sequence[str], load_models: Callable[[Sequence[str]], Team]) -> Comparator:
    """A team of the models named in `sources`, one per role."""
    return Comparator(policy="model", team=load_models(sources), version=", ".join(dict.fromkeys(sources)))
