"""Both kinds of critic: values that do not depend on the batch, gradients by autograd, and no language-model head."""

import math

import pytest
import torch

from comlrl_core.config.lora import LoraSettings
from comlrl_core.critics.building import CriticPlan, build_critics, renew_engines
from comlrl_core.critics.critic import SharedCritic, View
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.encoding import History
from comlrl_core.engine.local import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError
from comlrl_core.team.scalar import backbone_of, last_hidden, padded
from comlrl_core.team.scoring import scoring_mode
from comlrl_core.team.team import load_team

OPTIMIZER = OptimizerSettings(1e-3)
KINDS = [(True, True), (False, True), (False, False)]


def views(team, *texts: str, agents=(0, 1)) -> list[list[View]]:
    return [[View(History((text,), ()), tuple(team.encode(text, agent, 4))) for agent in agents] for text in texts]


@pytest.mark.parametrize(("central", "separate"), KINDS)
def test_a_value_does_not_depend_on_its_batch(team, make_critics, central: bool, separate: bool) -> None:
    critics = make_critics(central, separate)
    critic = critics.critics[-1]
    agents = tuple(critics.sees(len(critics.critics) - 1))
    inputs = critic.encode(views(team, "one.", "a much longer history of many words.", "two", agents=agents))
    together = critic.values(inputs)
    alone = [critic.values([ids])[0] for ids in inputs]
    assert together == pytest.approx(alone, abs=1e-5)
    assert critic.values(inputs, tokens_per_batch=1) == alone
    assert len({round(value, 6) for value in together}) == 3


@pytest.mark.parametrize(("central", "separate"), KINDS)
def test_the_language_model_head_is_never_computed(team, make_critics, central: bool, separate: bool) -> None:
    critics = make_critics(central, separate)

    def refuse(*_: object) -> None:
        raise AssertionError("a language-model head was computed")

    for model in team.models:
        model.lm_head.register_forward_hook(refuse)
    critic = critics.critics[0]
    inputs = critic.encode(views(team, "one.", agents=tuple(critics.sees(0))))
    critic.values(inputs)
    critic.backward(inputs, lambda values: values.sum())
    assert not any(hasattr(module, "lm_head") for module in critic.modules[:1])


def test_a_head_and_its_backbone_have_the_gradients_of_one_loss(team, make_critics) -> None:
    critic = make_critics(central=False, separate=False).critics[0]
    assert isinstance(critic, SharedCritic)
    inputs = critic.encode(views(team, "one.", "a longer one.", agents=(0,)))
    with scoring_mode(*critic.modules):
        loss = critic.backward(inputs, lambda values: (values - 1.0).square().sum())
    found = {name: p.grad.clone() for name, p in critic.backbone.named_parameters()}
    head = [p.grad.clone() for p in critic.head.parameters()]
    critic.agent.model.zero_grad()
    critic.head.zero_grad()
    hidden = last_hidden(critic.backbone, *padded(inputs, critic.agent.pad_id, critic.agent.device))
    expected = (critic.head(hidden).squeeze(-1) - 1.0).square().sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert any(gradient.abs().max() > 0 for gradient in found.values())
    for name, parameter in critic.backbone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    for gradient, parameter in zip(head, critic.head.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_head_on_an_adapter_reads_and_moves_that_adapter_alone() -> None:
    team = load_team(agent_model="builtin:tiny", num_agents=2, lora=LoraSettings(r=4))
    for model in team.models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    plan = CriticPlan(False, False, None, None, seed=3)
    critic = build_critics(team, build_engines(team.models, OPTIMIZER), plan, OPTIMIZER).critics[1]
    assert isinstance(critic, SharedCritic)
    inputs = critic.encode(views(team, "one.", "a longer one.", agents=(1,)))
    merged = backbone_of(team.models[1].merged())
    hidden = last_hidden(merged, *padded(inputs, critic.agent.pad_id, critic.agent.device))
    assert critic.values(inputs) == pytest.approx(critic.head(hidden).squeeze(-1).tolist(), abs=1e-5)
    critic.backward(inputs, lambda values: values.square().sum())
    moved = [any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()) for model in team.models]
    assert moved == [False, True]
    assert all(p.grad is None for p in team.models[1].get_base_model().parameters() if not p.requires_grad)


@pytest.mark.parametrize(("central", "separate"), KINDS)
def test_a_loss_that_is_not_finite_adds_nothing(team, make_critics, central: bool, separate: bool) -> None:
    critics = make_critics(central, separate)
    critic = critics.critics[0]
    inputs = critic.encode(views(team, "one.", agents=tuple(critics.sees(0))))
    assert math.isnan(critic.backward(inputs, lambda values: values.sum() * math.nan))
    assert all(p.grad is None for module in critic.modules for p in module.parameters())


def test_a_head_with_a_hidden_layer(make_critics) -> None:
    (critic,) = make_critics(central=True, hidden_dim=5).critics
    shapes = [tuple(p.shape) for p in critic.model.head.parameters()]
    assert shapes == [(5, 64), (5,), (1, 5), (1,)]


def test_new_engines_forget_the_moments(team, make_critics) -> None:
    critics = make_critics(central=False, separate=False)
    actors = build_engines(team.models, OPTIMIZER)
    before = critics.engines
    renew_engines(critics, actors, OPTIMIZER)
    assert not set(map(id, before)) & set(map(id, critics.engines))
    assert [critic.actor_engine for critic in critics.critics] == actors


def test_what_contradicts_itself_is_refused(team, make_critics) -> None:
    with pytest.raises(ConfigError, match="central critic"):
        CriticPlan(True, False, None, None, 0)
    with pytest.raises(ConfigError, match="1 critic models for 2 critics"):
        build_critics(
            team, build_engines(team.models, OPTIMIZER), CriticPlan(False, True, None, None, 0), OPTIMIZER, ["x"]
        )
    with pytest.raises(ConfigError, match="critic_devices names 3"):
        plan = CriticPlan(False, True, None, None, 0, devices=["cpu"] * 3)
        build_critics(team, build_engines(team.models, OPTIMIZER), plan, OPTIMIZER, ["builtin:tiny"] * 2)
    with pytest.raises(ConfigError, match="critic_max_length 5000 is above"):
        make_critics(central=True, max_length=5000)
    (critic,) = make_critics(central=True).critics
    with pytest.raises(ConfigError, match="1 critics; 2 needed"):
        Critics((critic,), False, 2)
