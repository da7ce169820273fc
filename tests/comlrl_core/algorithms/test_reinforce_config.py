"""The family's settings: the published names and defaults, bounds, and what is said about those that surprise."""

import logging

import pytest
from pydantic import ValidationError

from comlrl_core import notices
from comlrl_core.algorithms.reinforce import ReinforceSettings, reinforce_settings
from comlrl_core.algorithms.reinforce_config import (
    REINFORCE_CONFIGS,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLOOConfig,
)
from comlrl_core.errors import ConfigError
from comlrl_core.team.generation import Sampling

# The published defaults; the four differ in `advantage_mode` alone.
PUBLISHED = {
    "num_train_epochs": 20, "agent_learning_rate": 5e-6, "logging_steps": 50, "num_agents": 2,
    "parallel_training": "none", "agent_devices": None, "num_generations": 4, "max_new_tokens": 256,
    "temperature": 0.6, "top_p": 0.6, "top_k": 50, "num_turns": 2, "discount": 1.0, "joint_mode": "aligned",
    "early_termination_threshold": -0.2, "external_prompt_passthrough": False, "eval_interval": 16,
    "eval_num_samples": 4, "eval_batch_size": 1, "rollout_buffer_size": 2, "train_batch_size": None,
    "advantage_normalization": True, "reference_kl_enabled": False, "reference_kl_coef": 0.1,
    "reference_devices": None,
}  # fmt: skip
MODES = {MAGRPOConfig: "mean", MARLOOConfig: "rloo", MAReMaxConfig: "max", MAREINFORCEConfig: "raw"}
PLAIN = {"top_p": 1.0, "top_k": None, "num_turns": 1}


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.mark.parametrize("kind", MODES)
def test_every_published_field_has_its_published_default(kind: type[MAGRPOConfig]) -> None:
    config = kind()
    for field, expected in PUBLISHED.items():
        value = getattr(config, field)
        assert value == expected and isinstance(value, bool) == isinstance(expected, bool), field
    assert config.advantage_mode == MODES[kind]
    assert kind(**PUBLISHED, advantage_mode=MODES[kind]).model_dump() == config.model_dump()


def test_the_last_three_derive_from_magrpo_and_differ_in_advantage_mode_alone() -> None:
    base = MAGRPOConfig().model_dump(exclude={"advantage_mode"})
    for kind in (MARLOOConfig, MAReMaxConfig, MAREINFORCEConfig):
        assert issubclass(kind, MAGRPOConfig)
        assert kind().model_dump(exclude={"advantage_mode"}) == base
        with pytest.raises(ValidationError, match="advantage_mode"):
            kind(advantage_mode="mean")
    assert MAGRPOConfig(advantage_mode="rloo").advantage_mode == "rloo"
    assert [kind().advantage_mode for kind in REINFORCE_CONFIGS.values()] == ["mean", "rloo", "max", "raw"]


def test_every_field_is_described() -> None:
    assert [field for field, info in MAGRPOConfig.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_generations", 1),
        ("num_turns", 0),
        ("joint_mode", "crossed"),
        ("cross_aggregation", "max"),
        ("advantage_mode", "median"),
        ("tree_discount", 1.5),
        ("discount", -0.1),
        ("rollout_buffer_size", 0),
        ("train_batch_size", 3),  # above the buffer of 2
        ("temperature", 0.0),
        ("early_termination_threshold", float("nan")),
        ("reference_kl_coef", float("inf")),
        ("on_bad_reward", "ignore"),
        ("optimizer_state", "reset"),
        ("num_generation", 4),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        MAGRPOConfig(**{field: value})


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (MAGRPOConfig, PLAIN, []),
        (MAGRPOConfig, {"num_turns": 1}, ["top_p 0.6 and top_k 50 truncate the sampler"]),
        (MAGRPOConfig, {**PLAIN, "discount": 0.9}, ["discount 0.9 has no effect on rollout trees"]),
        (MAGRPOConfig, {**PLAIN, "num_turns": 2}, ["early_termination_threshold -0.2 ends every rollout"]),
        (MAGRPOConfig, {**PLAIN, "num_turns": 2, "early_termination_threshold": None}, []),
        (MARLOOConfig, PLAIN, ["makes advantage_mode: rloo the same as mean"]),
        (MAReMaxConfig, PLAIN, ["makes advantage_mode: max the same as mean"]),
        (MAREINFORCEConfig, PLAIN, ["makes advantage_mode: raw the same as mean"]),
        (MAREINFORCEConfig, {**PLAIN, "advantage_normalization": False}, []),
        (MAGRPOConfig, {**PLAIN, "cross_aggregation": "mean"}, ["cross_aggregation has no effect"]),
        (MAGRPOConfig, {**PLAIN, "collection_batch_size": 2}, []),
        (MAGRPOConfig, {**PLAIN, "collection_batch_size": 3}, ["more tasks than the 2 that fill the buffer"]),
    ],
)
def test_what_surprises_is_said_once(
    kind: type[MAGRPOConfig], settings: dict, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kind(**settings).say_notices()
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


def test_what_the_loop_needs_comes_from_the_settings() -> None:
    config = MARLOOConfig(
        temperature=0.8, seed=3, joint_mode="cross", cross_aggregation="mean", tree_discount=0.9,
        early_termination_threshold=None, rollout_buffer_size=8, train_batch_size=4, micro_batch_size=2,
        collection_batch_size=3, advantage_normalization=False, on_nonfinite_loss="skip",
    )  # fmt: skip
    found = reinforce_settings(config)
    assert found == ReinforceSettings(
        sampling=Sampling(256, 0.8, 0.6, 50), seed=3, num_generations=4, num_turns=2, joint_mode="cross",
        cross_aggregation="mean", tree_discount=0.9, early_termination_threshold=None, advantage_mode="rloo",
        advantage_normalization=False, kl_coef=0.0, rollout_buffer_size=8, train_batch_size=4, micro_batch_size=2,
        collection_batch_size=3, on_nonfinite="skip",
    )  # fmt: skip
    assert reinforce_settings(MAGRPOConfig(reference_kl_enabled=True)).kl_coef == 0.1
    assert config.nodes_per_update() == 4 and MAGRPOConfig().nodes_per_update() == 2
    assert not config.is_iterative()


def test_settings_of_the_loop_are_checked_too() -> None:
    for bad in ({"num_generations": 1}, {"kl_coef": float("nan")}, {"train_batch_size": -1}, {"joint_mode": "x"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ReinforceSettings(sampling=Sampling(4), seed=0, **bad)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        ReinforceSettings(sampling=Sampling(4, temperature=0.0), seed=0)
