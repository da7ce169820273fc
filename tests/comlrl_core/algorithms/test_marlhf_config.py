"""MARLHF's settings: the published names and defaults, contradictions, and what is said."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from comlrl_core import notices
from comlrl_core.algorithms.marlhf_config import CRITIC_FIELDS, FIXED_FIELDS, MARLHFConfig, MARLHFIterConfig

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_marlhf_defaults.json").read_text("utf-8"))
CLASSES = {"MARLHFConfig": MARLHFConfig, "MARLHFIterConfig": MARLHFIterConfig}
NOT_TAKEN = {"reward_model_device": "auto"}  # published "cuda:0" needs a GPU
NO_FIELD = {"comparator_api_key"}  # refused: a key is never a setting
FIELDS = [(name, field) for name, defaults in PUBLISHED.items() for field in defaults if field not in NO_FIELD]


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_published_field_has_its_published_default(name: str, field: str) -> None:
    value, expected = getattr(CLASSES[name](), field), NOT_TAKEN.get(field, PUBLISHED[name][field])
    assert value == expected
    assert isinstance(value, bool) == isinstance(expected, bool)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_published_defaults_can_be_written_out(name: str) -> None:
    found = CLASSES[name](**PUBLISHED[name])
    assert found.reward_model_device == "cuda:0"
    assert found.model_dump(exclude={"reward_model_device"}) == CLASSES[name]().model_dump(
        exclude={"reward_model_device"}
    )


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_is_described(name: str) -> None:
    assert [field for field, info in CLASSES[name].model_fields.items() if not info.description] == []


OTHER_VALUES = {
    "num_turns": 2, "joint_mode": "cross", "discount": 0.9, "early_termination_threshold": -0.2,
    "external_prompt_passthrough": True, "dpo_beta": 0.3, "loss_type": "hinge", "label_smoothing": 0.1,
    "reference": "initial", "environment_steps_per_pair": 1,
    "critic_model_name": "x", "critic_learning_rate": 1e-4, "critic_devices": "cpu", "use_separate_critic": False,
    "critic_type": "q", "value_loss_coef": 0.5, "value_clip_range": None, "critic_value_head_hidden_dim": 8,
    "value_head_hidden_dim": 8, "critic_max_length": 100, "q_baseline_samples": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(FIXED_FIELDS | CRITIC_FIELDS))
def test_fields_without_a_meaning_here_are_refused_at_other_values(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        MARLHFConfig(**{field: OTHER_VALUES[field]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl_algorithm": "maac", "use_separate_critic": False}, "use_separate_critic must be true for"),
        ({"rl_algorithm": "maac", "value_head_hidden_dim": 8}, "value_head_hidden_dim belongs to use_separate_critic"),
        (
            {"rl_algorithm": "iac", "use_separate_critic": False, "critic_model_name": "x"},
            "critic_model_name belongs to use_separate_critic: true",
        ),
        ({"rl_algorithm": "iac", "advantage_mode": "max"}, "advantage_mode has no meaning for rl_algorithm: iac"),
        ({"rl_algorithm": "iac", "value_clip_range": -1}, "value_clip_range"),
        ({"rl_algorithm": "iac", "critic_learning_rate": 0.0}, "critic_learning_rate"),
        ({"num_generations": 1}, "num_generations must be 2 or more for rl_algorithm: magrpo"),
    ],
)
def test_contradictions_about_critics(changes: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MARLHFIterConfig(**changes)


def test_backends_with_critics() -> None:
    central = MARLHFIterConfig(rl_algorithm="maac", num_generations=1, agent_learning_rate=1e-4)
    assert central.needs_critic() and central.has_central_critic() and central.clip_range() is None
    assert central.critic_rate() == 1e-4
    shared = MARLHFConfig(
        rl_algorithm="iac", use_separate_critic=False, value_head_hidden_dim=8, critic_learning_rate=1e-3
    )
    assert not shared.has_central_critic() and shared.clip_range() == 0.2 and shared.head_hidden_dim() == 8
    assert shared.critic_rate() == 1e-3 and not MARLHFConfig().needs_critic()


@pytest.mark.parametrize(
    ("backend", "mode"), [("magrpo", "mean"), ("marloo", "rloo"), ("maremax", "max"), ("mareinforce", "raw")]
)
def test_the_backend_decides_the_baseline(backend: str, mode: str) -> None:
    assert MARLHFConfig(rl_algorithm=backend).baseline() == mode
    assert MARLHFConfig(rl_algorithm=backend, advantage_mode=mode).baseline() == mode
    other = "max" if mode != "max" else "raw"
    with pytest.raises(ValidationError, match=f"advantage_mode: {other} contradicts rl_algorithm: {backend}"):
        MARLHFConfig(rl_algorithm=backend, advantage_mode=other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_generations", 0),
        ("reward_learning_rate", 0.0),
        ("reward_num_train_epochs", 0),
        ("reward_train_batch_size", 0),
        ("reward_max_length", 0),
        ("reward_eval_fraction", 1.0),
        ("center_rewards_coef", float("nan")),
        ("reward_probe_samples", -1),
        ("reward_model_name", ""),
        ("rl_algorithm", "ppo"),
        ("reward_model_init", "last"),
        ("preference_scoring_reward", "both"),
        ("preference_num_candidates", 1),
    ],
)
def test_out_of_bounds(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        MARLHFIterConfig(**{field: value})


def test_iterative_fields_belong_to_the_iterative_one() -> None:
    for field in ("reward_model_init", "preference_scoring_reward", "comparator_policy", "preference_replay_mode"):
        assert field in MARLHFIterConfig.model_fields and field not in MARLHFConfig.model_fields
    assert MARLHFConfig().fits_reward_model() and MARLHFIterConfig().fits_reward_model()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rl_algorithm": "marloo"}, "makes rl_algorithm: marloo the same as magrpo"),
        ({"preference_scoring_reward": "reward_model"}, "labels pairs with the model that is fitted to them"),
        ({}, "truncate the sampler"),
    ],
)
def test_what_surprises_is_said_once(settings: dict, said: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        MARLHFIterConfig(**settings).say_notices()
    assert caplog.text.count(said) == 1


def test_better_settings_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    MARLHFIterConfig(temperature=1.0, top_p=1.0, top_k=None, reference_kl_enabled=True).say_notices()
    assert caplog.text == ""
