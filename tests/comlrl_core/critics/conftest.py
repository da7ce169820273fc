"""A tiny team with engines, and critics of every kind for it."""

from collections.abc import Callable

import pytest
import torch

from comlrl_core.critics.building import CriticPlan, build_critics
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.local import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.team.team import Team, load_team

torch.set_num_threads(1)

OPTIMIZER = OptimizerSettings(1e-3)
MakeCritics = Callable[..., Critics]


@pytest.fixture
def team() -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, formatters=["[1] {prompt}\n", "[2] {prompt}\n"])


@pytest.fixture
def make_critics(team: Team) -> MakeCritics:
    def make(central: bool, separate: bool = True, folder=None, hidden_dim=None, max_length=None) -> Critics:
        plan = CriticPlan(central, separate, hidden_dim, max_length, seed=3)
        sources = ["builtin:tiny"] * (plan.count(2) if separate else 0)
        return build_critics(team, build_engines(team.models, OPTIMIZER), plan, OPTIMIZER, sources, folder=folder)

    return make
