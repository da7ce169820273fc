"""All settings of a run: bad ones are refused in seconds, by name, with what is allowed."""

import math
from typing import Any

import pytest
from pydantic import BaseModel

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.config.base import validate
from comlrl_core.config.run import ParamsFile, RunConfig, chain, iteration_key
from comlrl_core.errors import ConfigError

# (values, what is named, what is said to be allowed)
BAD_TRAINING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "training.temperature", "greater than 0"),
    ({"temperature": 0}, "training.temperature", "greater than 0"),
    ({"temperature": "hot"}, "training.temperature", "valid number"),
    ({"top_p": 7}, "training.top_p", "less than or equal to 1"),
    ({"top_p": 0}, "training.top_p", "greater than 0"),
    ({"top_k": 0}, "training.top_k", "greater than or equal to 1"),
    ({"max_new_tokens": 0}, "training.max_new_tokens", "greater than or equal to 1"),
    ({"max_new_tokens": 1.5}, "training.max_new_tokens", "valid integer"),
    ({"num_agents": 0}, "training.num_agents", "greater than or equal to 1"),
    ({"num_train_epochs": 0}, "training.num_train_epochs", "greater than or equal to 1"),
    ({"agent_learning_rate": 0}, "training.agent_learning_rate", "greater than 0"),
    ({"agent_learning_rate": math.inf}, "training.agent_learning_rate", "finite number"),
    ({"logging_steps": 0}, "training.logging_steps", "greater than or equal to 1"),
    ({"eval_interval": -1}, "training.eval_interval", "greater than or equal to 0"),
    ({"eval_num_samples": 0}, "training.eval_num_samples", "greater than or equal to 1"),
    ({"eval_batch_size": 0}, "training.eval_batch_size", "greater than or equal to 1"),
    ({"reference_kl_coef": math.nan}, "training.reference_kl_coef", "finite number"),
    ({"reference_kl_coef": -0.1}, "training.reference_kl_coef", "greater than or equal to 0"),
    ({"dpo_beta": math.nan}, "training.dpo_beta", "finite number"),
    ({"dpo_beta": 0}, "training.dpo_beta", "greater than 0"),
    ({"loss_type": "sigmiod"}, "training.loss_type", "'sigmoid', 'ipo' or 'hinge'"),
    ({"label_smoothing": 0.5}, "training.label_smoothing", "less than 0.5"),
    ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing", "belongs to loss_type: sigmoid"),
    ({"reference": "first"}, "training.reference", "'none', 'initial' or 'previous'"),
    ({"parallel_training": "ddp"}, "training.parallel_training", "'none' or 'mp'"),
    ({"parallel_training": "mp"}, "parallel_training", "needs agent_devices"),
    ({"agent_devices": ["cpu", "cpu", "cpu"]}, "agent_devices", "one, or one per agent"),
    ({"comparator_devices": ["cpu", "cpu", "cpu"]}, "comparator_devices", "one, or one per agent"),
    ({"seed": -1}, "training.seed", "greater than or equal to 0"),
    ({"gradient_clip": 0}, "training.gradient_clip", "greater than 0"),
    ({"weight_decay": 1}, "training.weight_decay", "less than 1"),
    ({"adam_beta2": 1.0}, "training.adam_beta2", "less than 1"),
    ({"lr_schedule": "cosin"}, "training.lr_schedule", "'constant_with_warmup', 'linear' or 'cosine'"),
    ({"lr_warmup_steps": 5}, "lr_warmup_steps", "must be 0 with lr_schedule: constant"),
    ({"optimizer_state": "keep"}, "training.optimizer_state", "'carry' or 'reset'"),
    ({"on_nonfinite_loss": "ignore"}, "training.on_nonfinite_loss", "'fail' or 'skip'"),
    ({"on_bad_reward": "zero"}, "training.on_bad_reward", "'fail' or 'drop'"),
    ({"rollout_buffer_size": 0}, "training.rollout_buffer_size", "greater than or equal to 1"),
    ({"rollout_buffer_size": 2, "train_batch_size": 4}, "train_batch_size", "above rollout_buffer_size"),
    ({"collection_batch_size": 0}, "training.collection_batch_size", "greater than or equal to 1"),
    ({"tokens_per_batch": 0}, "training.tokens_per_batch", "greater than or equal to 1"),
    ({"preference_num_candidates": 1}, "training.preference_num_candidates", "greater than or equal to 2"),
    ({"preference_pairs_per_sample": 0}, "training.preference_pairs_per_sample", "greater than or equal to 1"),
    ({"pair_selection": "all"}, "preference_pairs_per_sample", "must be null with pair_selection: all"),
    ({"pair_selection": "best"}, "training.pair_selection", "'comparator_reward', 'reward_gap', 'all' or 'random'"),
    ({"min_reward_gap": -0.1}, "training.min_reward_gap", "greater than or equal to 0"),
    ({"collaboration_mode": "centralized"}, "collaboration_mode", "allowed is decentralized"),
    ({"num_turns": 2}, "num_turns", "allowed is 1 alone"),
    ({"joint_mode": "cross"}, "joint_mode", "allowed is 'aligned' alone"),
    ({"discount": 0.9}, "discount", "allowed is 1.0 alone"),
    ({"preference_replay_mode": "recent"}, "training.preference_replay_mode", "'nearest_k'"),
    ({"preference_replay_mode": "nearest_k"}, "preference_replay_k", "needs preference_replay_k (1 or more)"),
    ({"preference_replay_mode": "lambda_decay"}, "preference_replay_lambda", "(0 to 1)"),
    ({"preference_replay_k": 2}, "preference_replay_k", "may be null or 1"),
    ({"preference_replay_mode": "all_history", "preference_replay_k": 2}, "preference_replay_k", "nearest_k"),
    (
        {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0.5, "preference_replay_k": 2},
        "preference_replay_k",
        "belongs to nearest_k",
    ),
    (
        {"preference_replay_mode": "nearest_k", "preference_replay_k": 2, "preference_replay_lambda": 0.5},
        "preference_replay_lambda",
        "belongs to lambda_decay",
    ),
    (
        {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 1.5},
        "training.preference_replay_lambda",
        "less than or equal to 1",
    ),
    ({"preference_replay_sample_size": 0}, "training.preference_replay_sample_size", "greater than or equal to 1"),
    ({"comparator_policy": "yesterday"}, "training.comparator_policy", "'current_copy', 'model' or 'history'"),
    ({"comparator_policy": "api"}, "comparator_policy", "allowed are current, current_copy, model, history"),
    ({"comparator_policy": "model"}, "comparator_model_name", "either comparator_model_name or comparator_agents"),
    (
        {"comparator_policy": "model", "comparator_model_name": "a", "comparator_agents": ["b", "c"]},
        "comparator_agents",
        "either comparator_model_name or comparator_agents",
    ),
    (
        {"comparator_policy": "model", "comparator_agents": ["b", "c", "d"]},
        "comparator_agents",
        "one per agent, or comparator_model_name for all",
    ),
    ({"comparator_model_name": "builtin:tiny"}, "comparator_model_name", "belongs to comparator_policy: model"),
    ({"comparator_agents": ["a", "b"]}, "comparator_agents", "belongs to comparator_policy: model"),
    ({"comparator_history_k": 1}, "comparator_history_k", "belongs to comparator_policy: history"),
    (
        {"comparator_policy": "history", "comparator_history_k": 0},
        "training.comparator_history_k",
        "greater than or equal to 1",
    ),
    ({"comparator_num_candidates": 0}, "training.comparator_num_candidates", "greater than or equal to 1"),
    ({"comparator_generation_mode": "centralized"}, "training.comparator_generation_mode", "'decentralized'"),
    ({"comparator_api_format": "openai"}, "training.comparator_api_format", "'generic'"),
    ({"comparator_api_url": "http://x"}, "training.comparator_api_url", "should be None"),
    ({"dpo_bta": 0.3}, "training.dpo_bta", "did you mean 'dpo_beta'"),
    ({"preference_replay_lam": 0.3}, "training.preference_replay_lam", "did you mean 'preference_replay_lambda'"),
    ({"zzz": 1}, "training.zzz", "unknown setting; known are adam_beta1, "),
    ({"num_iterations": 2}, "num_iterations", "differs from the top level's num_iterations 6"),
]

BAD_ELSEWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"algorithm": "madpo_iterative"}, "algorithm", "'madpo_iter', 'madpo', 'marlhf_iter'"),
    ({"algorithm": "madpo", "num_iterations": 2}, "num_iterations", "must be 1 for the offline algorithm"),
    (
        {"algorithm": "madpo", "training": {"pair_selection": "comparator_reward"}},
        "training.pair_selection",
        "'reward_gap', 'all' or 'random'",
    ),
    ({"algorithm": "madpo", "training": {"comparator_policy": "history"}}, "comparator_policy", "unknown setting"),
    ({"num_iterations": 0}, "num_iterations", "greater than or equal to 1"),
    ({"num_iterations": 10_000}, "num_iterations", "less than or equal to 9999"),
    ({"training": "fast"}, "training", "a mapping of training settings is needed"),
    ({"trainig": {}}, "trainig", "did you mean 'training'"),
    ({"team": {"agents": ["a", "b"]}}, "team", "either agent_model (one for all) or agents"),
    ({"team": {"agent_model": None}}, "team", "either agent_model (one for all) or agents"),
    (
        {"team": {"agent_model": None, "agents": ["a", "b", "c"]}, "training": {"num_agents": 2}},
        "team.agents",
        "training.num_agents is 2",
    ),
    ({"team": {"templates": ["a", "b", "c"]}}, "team.templates", "one, or one per agent"),
    ({"team": {"system_prompts": ["a"]}}, "team.system_prompts", "one, or one per agent"),
    ({"team": {"formatter": "f.py:f", "templates": "x"}}, "formatter", "give one or the other"),
    ({"team": {"on_long_prompt": "cut"}}, "team.on_long_prompt", "'fail' or 'truncate_left'"),
    ({"team": {"agnt_model": "x"}}, "team.agnt_model", "did you mean 'agent_model'"),
    ({"tasks": {"num_train": 0}}, "tasks.num_train", "greater than or equal to 1"),
    ({"evaluation": {"confidence": 1.0}}, "evaluation.confidence", "less than 1"),
    ({"evaluation": {"greedy": True}}, "samples_per_task", "must be 1 with greedy"),
    ({"evaluation": {"samples_per_task": 0}}, "evaluation.samples_per_task", "greater than or equal to 1"),
    ({"reward": {"functoin": "a:b"}}, "reward.functoin", "did you mean 'function'"),
    ({"tracking": {"experiment": ""}}, "tracking.experiment", "at least 1 character"),
]


@pytest.mark.parametrize(("values", "field", "allowed"), BAD_TRAINING, ids=[str(bad[0]) for bad in BAD_TRAINING])
def test_a_bad_setting_fails_an_hour_later_or_never(values: dict, field: str, allowed: str) -> None:
    """Pitfall 35: each is refused before anything is loaded, and the message names field and allowance."""
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, {"training": values}, "params.yaml")
    message = str(refused.value)
    assert message.startswith("params.yaml: ") and field in message and allowed in message


@pytest.mark.parametrize(("values", "field", "allowed"), BAD_ELSEWHERE, ids=[str(bad[0]) for bad in BAD_ELSEWHERE])
def test_a_bad_section_fails_an_hour_later_or_never(values: dict, field: str, allowed: str) -> None:
    """Pitfall 35 outside of `training`."""
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, values, "params.yaml")
    assert field in str(refused.value) and allowed in str(refused.value)


@pytest.mark.parametrize("values", [bad[0] for bad in BAD_TRAINING if "num_iterations" not in bad[0]], ids=str)
def test_the_config_class_refuses_it_too(values: dict) -> None:
    """Python users get a ValueError that names the field. Counts are held against a team that is known."""
    with pytest.raises(ValueError) as refused:
        MADPOIterConfig(**{"num_agents": 2, **values})
    assert any(name in str(refused.value) for name in values)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, {"training": {"temperature": -1, "dpo_bta": 1}, "taks": {}}, "params.yaml")
    assert len(str(refused.value).splitlines()) == 3


KEY = "sk-very-secret-0123456789"


@pytest.mark.parametrize(
    "training",
    [
        {"comparator_api_key": KEY},
        {"comparator_api_key": KEY, "temperature": -1},
        {"comparator_api_key_env": KEY},
        {"comparator_api_kye": KEY},
        {"comparator_api_headers": {"Authorization": f"Bearer {KEY}"}},
        {"comparator_api_extra_body": {"key": KEY}},
        {"comparator_api_key_prefix": [KEY]},
        {"comparator_api_url": f"https://user:{KEY}@host/v1"},
    ],
    ids=str,
)
def test_the_api_key_ends_up_in_an_error(training: dict) -> None:
    """Pitfall 34: an error is copied into logs and reports; no refused setting shows a key, by whichever door."""
    given = dict(training)
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, {"training": training}, "params.yaml")
    assert KEY not in str(refused.value) and "comparator_api" in str(refused.value)
    with pytest.raises(ValueError) as direct:
        MADPOIterConfig(**training)
    assert KEY not in str(direct.value) and KEY not in repr(direct.value)
    assert training == given  # the caller's own mapping is left alone


def test_a_key_is_pointed_to_its_environment_variable() -> None:
    with pytest.raises(ValueError, match="comparator_api_key_env"):
        MADPOIterConfig(comparator_api_key=KEY)


def test_the_list_of_agents_sets_their_number() -> None:
    config = RunConfig(team={"agent_model": None, "agents": ["builtin:tiny"] * 3})
    assert config.training.num_agents == 3


def test_the_algorithm_decides_which_settings_there_are() -> None:
    offline = RunConfig(algorithm="madpo")
    assert type(offline.training) is MADPOConfig and offline.num_iterations == 1
    iterative = RunConfig(num_iterations=3, training={"dpo_beta": 0.3})
    assert type(iterative.training) is MADPOIterConfig
    assert (iterative.training.num_iterations, iterative.training.dpo_beta) == (3, 0.3)
    # A form sends every field; those of the other algorithm do no harm at their defaults.
    assert RunConfig(algorithm="madpo", training={"comparator_policy": "current"}) == offline
    again = RunConfig(training=MADPOIterConfig(dpo_beta=0.3))
    assert again.training.dpo_beta == 0.3


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algorithm": "madpo"},
        {"num_iterations": 2, "training": {"comparator_policy": "history", "seed": 3}},
        {"team": {"agent_model": None, "agents": ["builtin:tiny"] * 3}},
    ],
)
def test_values_read_back_give_the_same_run(values: dict) -> None:
    config = RunConfig(**values)
    plain = config.values()
    assert "num_iterations" not in plain["training"]
    assert RunConfig(**plain) == config
    assert RunConfig(**plain).values() == plain


def test_every_setting_is_described() -> None:
    def missing(model: type[BaseModel], path: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(f"{path}{name}")
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found += missing(kind, f"{path}{name}.")
        return found

    assert missing(ParamsFile, "") == []


def test_the_chain_of_iterations_must_be_whole() -> None:
    assert iteration_key(12) == "0012"
    assert chain(2) == {"0001": {"previous": "0000"}, "0002": {"previous": "0001"}}
    good = ParamsFile(num_iterations=2, last_iteration="0002", iterations=chain(2))
    assert good.run_config() == RunConfig(num_iterations=2)
    assert ParamsFile(num_iterations=2).run_config() == RunConfig(num_iterations=2)
    for broken in ({"iterations": chain(3)}, {"last_iteration": "0002"}, {"iterations": {"0001": {"previous": "x"}}}):
        with pytest.raises(ConfigError, match="comlrl iterations 2"):
            validate(ParamsFile, {"num_iterations": 2, **broken}, "params.yaml")
