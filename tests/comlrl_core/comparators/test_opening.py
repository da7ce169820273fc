"""From settings to the other side."""

import pytest

from comlrl_core.algorithms.madpo_config import MADPOIterConfig
from comlrl_core.comparators import open_comparator
from comlrl_core.comparators.opening import comparator_sources
from comlrl_core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "policy", "version", "loaded"),
    [
        ({}, "current", "current", []),
        ({"comparator_policy": "current_copy"}, "current_copy", "current", []),
        ({"comparator_policy": "history"}, "history", "iteration_0002", [2]),
        ({"comparator_policy": "history", "comparator_history_k": 3}, "history", "iteration_0000", [0]),
        ({"comparator_policy": "model", "comparator_model_name": "m"}, "model", "m", [["m", "m"]]),
        ({"comparator_policy": "model", "comparator_agents": ["m", "n"]}, "model", "m, n", [["m", "n"]]),
    ],
)
def test_each_policy_opens_its_own_side(team, settings: dict, policy: str, version: str, loaded: list) -> None:
    asked: list = []

    def load(what):
        asked.append(list(what) if isinstance(what, list) else what)
        return team.copy()

    comparator = open_comparator(MADPOIterConfig(**settings), team, 4, load, load)
    assert (comparator.policy, comparator.version, asked) == (policy, version, loaded)
    assert (comparator.team is team) == (policy == "current")


def test_a_model_per_role_or_one_for_all() -> None:
    one = MADPOIterConfig(comparator_policy="model", comparator_model_name="m")
    assert comparator_sources(one, 3) == ["m", "m", "m"]
    several = MADPOIterConfig(comparator_policy="model", comparator_agents=["m", "n"])
    assert comparator_sources(several, 2) == ["m", "n"]
    with pytest.raises(ConfigError, match="comparator_agents lists 2 models for 3 agents"):
        comparator_sources(several, 3)
