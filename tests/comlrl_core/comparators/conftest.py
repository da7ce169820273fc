"""A live team of two tiny agents."""

import pytest

from comlrl_core.team.team import Team, load_team


@pytest.fixture
def team() -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, seed=5)
