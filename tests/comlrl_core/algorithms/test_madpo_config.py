"""MADPO's settings: the published names and defaults, and what is said about those that surprise."""

import json
import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from comlrl_core import notices
from comlrl_core.algorithms.madpo_config import FIXED_FIELDS, MADPOConfig, MADPOIterConfig

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_defaults.json").read_text("utf-8"))
CLASSES = {"MADPOConfig": MADPOConfig, "MADPOIterConfig": MADPOIterConfig}
FIELDS = [(name, field) for name, defaults in PUBLISHED.items() for field in defaults]


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_published_field_has_its_published_default(name: str, field: str) -> None:
    value, expected = getattr(CLASSES[name](), field), PUBLISHED[name][field]
    assert value == expected
    assert isinstance(value, bool) == isinstance(expected, bool)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_published_defaults_can_be_written_out(name: str) -> None:
    """Code that spells every published default, an empty key included, gives the default settings."""
    spelt = dict(PUBLISHED[name])
    if name == "MADPOIterConfig":
        spelt["comparator_api_key"] = None
    assert CLASSES[name](**spelt).model_dump() == CLASSES[name]().model_dump()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_is_described(name: str) -> None:
    assert [field for field, info in CLASSES[name].model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_turns", 2),
        ("joint_mode", "cross"),
        ("discount", 0.9),
        ("early_termination_threshold", -0.2),
        ("external_prompt_passthrough", True),
        ("advantage_normalization", False),
        ("advantage_mode", "rloo"),
    ],
)
def test_fields_without_a_meaning_here_are_refused_at_other_values(field: str, value: object) -> None:
    assert field in FIXED_FIELDS
    with pytest.raises(ValidationError, match=rf"{field} has no meaning for MADPO; allowed is {FIXED_FIELDS[field]!r}"):
        MADPOIterConfig(**{field: value})


def test_iterative_or_not_is_a_question_to_the_settings() -> None:
    assert (MADPOConfig().is_iterative(), MADPOConfig().iterations()) == (False, 1)
    assert (MADPOIterConfig().is_iterative(), MADPOIterConfig(num_iterations=3).iterations()) == (True, 3)


def test_a_minibatch_is_the_buffer_unless_told_otherwise() -> None:
    assert MADPOConfig(rollout_buffer_size=8).pairs_per_update() == 8
    assert MADPOConfig(rollout_buffer_size=8, train_batch_size=4).pairs_per_update() == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["top_p 0.6 and top_k 50 truncate the sampler"]),
        ({"top_p": 1.0, "top_k": None}, []),
        ({"top_p": 1.0, "top_k": None, "reference_kl_enabled": True}, ["reference_kl_enabled has no effect"]),
        ({"top_p": 1.0, "top_k": None, "preference_replay_sample_size": 9}, ["preference_replay_sample_size"]),
        ({"top_p": 1.0, "top_k": None, "preference_replay_lambda": 0.5}, ["preference_replay_lambda"]),
    ],
)
def test_what_has_no_effect_is_said_once(settings: dict, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            MADPOIterConfig(**settings).say_notices()
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


def test_settings_are_checked_on_assignment_too() -> None:
    config = MADPOIterConfig()
    with pytest.raises(ValidationError, match="dpo_beta"):
        config.dpo_beta = -1.0
    assert config.dpo_beta == 0.1


def test_a_count_of_devices_is_held_against_given_counts_alone() -> None:
    """Three devices with the default of two agents: a list of three agents may still come."""
    config = MADPOIterConfig(agent_devices=["cpu", "cpu", "cpu"])
    config.num_agents = 3
    with pytest.raises(ValidationError, match="agent_devices names 3 devices for num_agents: 2"):
        config.num_agents = 2
    assert MADPOIterConfig(num_agents=3, agent_devices=["cpu"]).agent_devices == "cpu"  # one for all
