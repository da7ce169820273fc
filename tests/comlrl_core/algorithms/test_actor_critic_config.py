"""The settings of actor-critic: the published names and defaults, contradictions, and what is said."""

import logging

import pytest
from pydantic import ValidationError

from comlrl_core import notices
from comlrl_core.algorithms.actor_critic import actor_critic_settings
from comlrl_core.algorithms.actor_critic_config import IACConfig, MAACConfig
from comlrl_core.algorithms.critic_setup import critic_plan, critic_sources
from comlrl_core.errors import ConfigError
from comlrl_core.team.tiny import load_tiny

PUBLISHED = {
    "agent_learning_rate": 5e-6, "critic_learning_rate": 5e-6, "rollout_buffer_size": 8, "train_batch_size": None,
    "value_loss_coef": 0.6, "advantage_normalization": True, "max_new_tokens": 256, "temperature": 0.6, "top_p": 0.6,
    "top_k": None, "num_train_epochs": 40, "num_agents": 2, "num_generations": 1, "num_turns": 2,
    "parallel_training": "none", "agent_devices": None, "critic_devices": None, "external_prompt_passthrough": False,
    "discount": 1.0, "critic_type": "v", "early_termination_threshold": -0.2, "eval_interval": 16,
    "eval_num_samples": 4, "eval_batch_size": 1, "logging_steps": 1, "reference_kl_enabled": False,
    "reference_kl_coef": 0.1, "reference_devices": None,
}  # fmt: skip
OF_IAC = {
    "value_clip_range": 0.2, "use_separate_critic": True, "critic_value_head_hidden_dim": None,
    "value_head_hidden_dim": None,
}  # fmt: skip
ONE_TURN = {"num_turns": 1, "early_termination_threshold": None, "top_p": 1.0}


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.mark.parametrize(("kind", "published"), [(MAACConfig, PUBLISHED), (IACConfig, {**PUBLISHED, **OF_IAC})])
def test_every_published_field_has_its_published_default(kind: type[MAACConfig], published: dict) -> None:
    config = kind()
    for field, expected in published.items():
        value = getattr(config, field)
        assert value == expected and isinstance(value, bool) == isinstance(expected, bool), field
    assert kind(**published).model_dump() == config.model_dump()
    assert [field for field, info in kind.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (MAACConfig, {"num_generations": 4}, "num_generations must be 1 with num_turns 2, not 4"),
        (MAACConfig, {"num_generations": 0}, "num_generations"),
        (MAACConfig, {"use_separate_critic": False}, "use_separate_critic"),
        (MAACConfig, {"critic_type": "a"}, "critic_type"),
        (MAACConfig, {"value_loss_coef": -0.1}, "value_loss_coef"),
        (MAACConfig, {"discount": 1.1}, "discount"),
        (MAACConfig, {"optimizer_state": "reset"}, "optimizer_state: reset belongs to iterative"),
        (MAACConfig, {"train_batch_size": 9}, "train_batch_size 9 is above rollout_buffer_size 8"),
        (MAACConfig, {"q_baseline_samples": 0}, "q_baseline_samples"),
        (IACConfig, {"value_clip_range": -1}, "value_clip_range"),
        (IACConfig, {"value_clip_range": 0}, "value_clip_range"),
        (IACConfig, {"use_separate_critic": False, "critic_model_name": "x"}, "critic_model_name belongs to"),
        (IACConfig, {"use_separate_critic": False, "critic_devices": "cpu"}, "critic_devices belongs to"),
        (IACConfig, {"use_separate_critic": False, "critic_value_head_hidden_dim": 8}, "critic_value_head_hidden_dim"),
        (IACConfig, {"value_head_hidden_dim": 8}, "value_head_hidden_dim belongs to use_separate_critic: false"),
    ],
)
def test_contradictions_are_refused_by_name(kind: type[MAACConfig], changes: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**changes)


def test_what_the_loop_and_the_critics_are_told() -> None:
    central = MAACConfig(**ONE_TURN, num_generations=3, discount=0.9, reference_kl_enabled=True, critic_type="q")
    told = actor_critic_settings(central)
    assert (told.rule.critic_type, told.rule.discount, told.rule.kl_coef) == ("q", 0.9, 0.1)
    assert told.num_generations == 3 and told.value_clip_range is None
    assert (critic_plan(central).central, critic_plan(central).separate) == (True, True)
    shared = IACConfig(**ONE_TURN, use_separate_critic=False, value_head_hidden_dim=7)
    assert actor_critic_settings(shared).value_clip_range == 0.2
    plan = critic_plan(shared)
    assert (plan.central, plan.separate, plan.hidden_dim, plan.count(2)) == (False, False, 7, 2)
    assert central.needs_critic() and not central.is_iterative()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MAACConfig(top_p=1.0), "ends every rollout"),
        (MAACConfig(**{**ONE_TURN, "top_p": 0.6}), "truncate the sampler"),
        (MAACConfig(**ONE_TURN, collection_batch_size=9), "rolls out more tasks than the 8"),
        (IACConfig(**ONE_TURN, value_clip_range=0.3), "value_clip_range 0.3 has no effect"),
    ],
)
def test_what_surprises_is_said_once(config: MAACConfig, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "comlrl_core"):
        for _ in range(2):
            config.say_notices()
    assert caplog.text.count(said) == 1


def test_better_settings_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    MAACConfig(**ONE_TURN).say_notices()
    assert caplog.text == ""


def test_where_critics_come_from() -> None:
    tiny, pretrained = "builtin:tiny", "builtin:tiny-pretrained"
    assert critic_sources(MAACConfig(), [tiny], 2) == [tiny]
    assert critic_sources(MAACConfig(), [pretrained, tiny], 2) == [pretrained]
    assert critic_sources(IACConfig(), [pretrained, tiny], 2) == [pretrained, tiny]
    assert critic_sources(IACConfig(), [None, None], 2, critic_model=tiny) == [tiny, tiny]
    assert critic_sources(IACConfig(critic_model_name=pretrained), [tiny], 3) == [pretrained] * 3
    assert critic_sources(IACConfig(use_separate_critic=False), [None], 2) == []


def test_critics_that_cannot_be_are_refused() -> None:
    tiny = "builtin:tiny"
    loaded, _ = load_tiny(0)
    cases = [
        (IACConfig(), {"agents": [None, tiny]}, "critic_model is needed: the agents are loaded objects"),
        (IACConfig(), {"critic_model": tiny, "critics": [tiny]}, "critic_model and critics both name"),
        (IACConfig(critic_model_name=tiny), {"critic_model": tiny}, "critic_model and critic_model_name both name"),
        (IACConfig(use_separate_critic=False), {"critics": [tiny, tiny]}, "contradicts use_separate_critic: false"),
        (IACConfig(), {"critics": [tiny]}, "critics must be a list with 2 models: one per agent"),
        (MAACConfig(), {"critics": [tiny, tiny]}, "critics must be a list with 1 model: one that sees all agents"),
        (IACConfig(), {"critic_model": loaded}, "a loaded critic_model is one critic"),
        (IACConfig(), {"critics": [loaded, loaded]}, "names one loaded model twice"),
        (MAACConfig(), {"critic_model": "no/such/folder/at all"}, "critic_model: "),
        (MAACConfig(critic_max_length=5000), {}, "critic_max_length 5000 is above the context"),
    ]
    for config, changes, message in cases:
        given = {"agents": [tiny, tiny], "num_agents": 2, **changes}
        with pytest.raises(ConfigError, match=message):
            critic_sources(config, **given)
