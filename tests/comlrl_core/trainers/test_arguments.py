"""What a trainer is given is checked before any model is loaded."""

import logging

import pytest

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.errors import ConfigError
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.team.team import load_team
from comlrl_core.trainers import team_trainer
from comlrl_core.trainers.arguments import config_of, count_agents, make_oracle, set_agents

TINY = "builtin:tiny"


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(team_trainer, "load_team", load)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda first: [0.0], "2 list"),
        (lambda a, b, c: [0.0], "2 list"),
        (lambda a, b, *, weight: [0.0], "weight"),
        (None, "reward_func is required"),
        (3, "cannot be called"),
        ("builtin:beauty", "no built-in reward 'beauty'"),
    ],
)
def test_a_reward_of_the_wrong_arity_fails_an_hour_later(make_iterative, no_loading, reward, message: str) -> None:
    """Pitfall 35: the signature is read before any model is loaded."""
    with pytest.raises(ConfigError, match=message):
        make_iterative(reward_func=reward)


@pytest.mark.parametrize(
    ("arguments", "args", "message"),
    [
        ({"agents": [TINY] * 3, "num_agents": 2}, {}, "agents says 3, num_agents says 2"),
        ({"agents": [TINY] * 3}, {"num_agents": 2}, r"agents says 3, args\.num_agents says 2"),
        ({"num_agents": 3}, {"num_agents": 2}, r"num_agents says 3, args\.num_agents says 2"),
        ({"agents": [TINY] * 2, "agent_model": TINY}, {}, "either agent_model"),
        ({"agent_model": None}, {}, "either agent_model"),
        ({"eval_logger": print}, {}, "eval_logger and eval_aggregator belong together"),
        ({"eval_aggregator": print}, {}, "eval_logger and eval_aggregator belong together"),
        ({"centralized_comparator_adapter": object()}, {}, "centralized comparators are not offered yet"),
        ({"num_agents": 3}, {"agent_devices": ["cpu", "cpu"]}, "agent_devices names 2 devices for num_agents: 3"),
        ({"reward_processor": 3}, {}, "reward_processor"),
        ({}, {"log_reward_distribution": True}, "log_reward_distribution needs reward_func.reward_range"),
        (
            {"num_agents": 2},
            {"comparator_policy": "model", "comparator_agents": [TINY] * 3},
            "comparator_agents lists 3 models for num_agents: 2",
        ),
    ],
)
def test_contradictions_are_refused_by_name(make_iterative, no_loading, arguments, args, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_iterative(args, **arguments)


def test_only_given_counts_can_disagree() -> None:
    three = [TINY] * 3
    assert count_agents(MADPOIterConfig(), None, three, None) == 3
    assert count_agents(MADPOIterConfig(), None, three, 3) == 3
    assert count_agents(MADPOIterConfig(num_agents=3), TINY, None, None) == 3
    assert count_agents(MADPOIterConfig(), TINY, None, 4) == 4
    assert count_agents(MADPOIterConfig(), TINY, None, None) == 2
    model = load_team(agent_model=TINY, num_agents=1).models[0]
    assert count_agents(MADPOIterConfig(), model, None, None) == 1


def test_devices_per_agent_wait_for_the_list_of_agents() -> None:
    args = MADPOIterConfig(agent_devices=["cpu"] * 3)
    set_agents(args, 3)
    assert args.num_agents == 3
    with pytest.raises(ConfigError, match="agent_devices names 3 devices for num_agents: 2"):
        set_agents(MADPOIterConfig(agent_devices=["cpu"] * 3), 2)


def test_settings_of_another_algorithm_are_refused_and_ones_own_copied() -> None:
    with pytest.raises(ConfigError, match="args must be a MADPOConfig, not a MADPOIterConfig"):
        config_of(MADPOIterConfig(), MADPOConfig)
    with pytest.raises(ConfigError, match="args must be a MADPOIterConfig, not a dict"):
        config_of({}, MADPOIterConfig)
    assert config_of(None, MADPOConfig) == MADPOConfig()
    mine = MADPOConfig()
    config_of(mine, MADPOConfig).num_agents = 5
    assert mine == MADPOConfig() and "num_agents" not in mine.model_fields_set


def test_a_reward_by_name_is_the_same_as_the_function() -> None:
    by_name, by_object = (make_oracle(given, 2, None, "fail") for given in ("builtin:length_ratio", length_ratio))
    assert by_name.label == by_object.label and by_name.func is by_object.func


def test_published_arguments_without_effect_are_said_once(make_iterative, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            make_iterative(wandb_config={"project": "x"}, external_transition=print)
    assert sum("MLflow" in message for message in caplog.messages) == 1
    assert sum("external_transition" in message for message in caplog.messages) == 1


def test_an_unknown_argument_is_refused(make_iterative) -> None:
    with pytest.raises(TypeError, match="reward_fucn"):
        make_iterative(reward_fucn=print)
