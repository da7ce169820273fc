"""One iteration's stages: fit, update, probe."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from comlrl_core import notices
from comlrl_core.algorithms import marlhf
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.algorithms.shared import Learned, make_engines
from comlrl_core.errors import ConfigError
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import open_reward_model, save_reward_model
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.team import Team, load_team

torch.set_num_threads(1)

TINY = "builtin:tiny"
TASKS = [{"task_id": f"t{n}", "prompt": f"the {word} bird."} for n, word in enumerate(("red", "old", "shy", "big"))]
SETTINGS = {
    "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": None, "num_generations": 3,
    "rollout_buffer_size": 2, "num_train_epochs": 1, "agent_learning_rate": 1e-3, "reward_train_batch_size": 2,
    "reward_learning_rate": 1e-3, "reward_probe_samples": 4, "reward_eval_fraction": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


def lengths(first: list[str], second: list[str]) -> list[float]:
    return [float(len(b) - len(a)) for a, b in zip(first, second, strict=True)]


def config(**changes) -> MARLHFIterConfig:
    return MARLHFIterConfig(**{**SETTINGS, **changes})


@pytest.fixture
def team() -> Team:
    return load_team(agent_model=TINY, num_agents=2, formatters="{prompt}\n")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(lengths, 2)


@pytest.fixture
def records() -> list[PairRecord]:
    return [
        PairRecord(
            prompts=(f"{task['prompt']}\n",) * 2,
            winner_completions=("a", "the bird sings."),
            loser_completions=("a", "b"),
            winner_reward=14.0,
            loser_reward=0.0,
            candidate_reward_mean=7.0,
            task_id=task["task_id"],
        )
        for task in TASKS
    ]


def test_an_iteration_moves_the_policies_and_leaves_a_frozen_model(team, oracle, records) -> None:
    args = config()
    before = team.fingerprint()
    fitted: list[bool] = []
    outcome = marlhf.learn(
        team,
        make_engines(team, args),
        TASKS,
        records,
        oracle,
        args,
        iteration=1,
        source=TINY,
        environment_steps=7,
        on_fitted=lambda model, fit: fitted.append(team.fingerprint() == before),
    )
    assert fitted == [True]
    assert team.fingerprint() != before
    assert outcome.model is not None
    assert not any(parameter.requires_grad for parameter in outcome.model.parameters())
    assert outcome.learned.environment_steps == 7 + 4 * 3
    assert [step["nodes"] for step in outcome.learned.history] == [2, 2]
    assert outcome.metrics["reward_model/train_pairs"] == 4
    assert {"reward_model/samples", "reward_model/after/samples", "reward_model/alarm"} <= outcome.metrics.keys()


def test_the_reward_models_scores_are_what_the_policies_learn_from(team, oracle, records) -> None:
    """A task reward that says something else than the reward model changes no weight."""
    args = config()
    prints = set()
    for reward in (lengths, lambda first, second: [-x for x in lengths(first, second)]):
        twin = load_team(agent_model=TINY, num_agents=2, formatters="{prompt}\n")
        engines = make_engines(twin, args)
        marlhf.learn(twin, engines, TASKS, records, Oracle(reward, 2), args, iteration=1, source=TINY)
        prints.add(twin.fingerprint())
    assert len(prints) == 1


@pytest.mark.parametrize("drawn", ["none", "too long"])
def test_without_a_pair_the_policies_stay_as_they_are(team, oracle, records, drawn, caplog) -> None:
    args = config(reward_max_length=12 if drawn == "too long" else None)
    given = records if drawn == "too long" else []
    given = [replace(record, winner_completions=("a" * 40, "b" * 40)) for record in given]
    before = team.fingerprint()
    newest = open_reward_model(TINY, 2)
    outcome = marlhf.learn(
        team, make_engines(team, args), TASKS, given, oracle, args, iteration=2, source=TINY, newest=newest
    )
    assert team.fingerprint() == before
    assert outcome.model is newest
    assert outcome.learned.history == [] and outcome.fit.train_pairs == 0
    assert "iteration 2: there are no pairs to fit a reward model to" in caplog.text


def test_a_fresh_model_from_the_base_or_the_previous_one(records) -> None:
    """`base` forgets; `previous` goes on. Either way the optimizer's moments are fresh."""
    previous = open_reward_model(TINY, 2, head_seed=99)
    with torch.no_grad():
        previous.head.weight.fill_(0.5)
    args = config()
    base = marlhf.starting_model(args, TINY, 2, previous)
    assert base is not previous
    assert base.fingerprint() == marlhf.new_reward_model(args, TINY, 2).fingerprint()
    assert base.fingerprint() != marlhf.new_reward_model(args, TINY, 3).fingerprint()  # a head of its own seed
    going_on = marlhf.starting_model(config(reward_model_init="previous"), TINY, 2, previous)
    assert going_on is previous and all(p.requires_grad for p in going_on.parameters())
    first = marlhf.starting_model(config(reward_model_init="previous"), TINY, 1, None)
    assert first.fingerprint() == marlhf.new_reward_model(args, TINY, 1).fingerprint()


def test_builtin_tiny_starts_as_the_first_agent_did(team) -> None:
    model = marlhf.new_reward_model(config(), TINY, 1)
    weights = team.models[0].base_model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.backbone.state_dict().items())


def test_a_base_of_another_name_takes_only_general_options_from_the_agents() -> None:
    agents = {"dtype": "bfloat16", "revision": "v1", "special_tokens": ["<tool>"]}
    model = marlhf.new_reward_model(config(reward_model_name=TINY), TINY, 1, agents)
    assert model.backbone.dtype == torch.bfloat16 and len(model.tokenizer) == 320
    with pytest.raises(ConfigError, match="not revision"):
        marlhf.new_reward_model(config(), TINY, 1, agents)  # the agents' base, with their options
    grown = marlhf.new_reward_model(config(), TINY, 1, {"special_tokens": ["<tool>"]})
    assert len(grown.tokenizer) == 321


def test_a_frozen_backbone_is_not_trained(records) -> None:
    args = config(reward_freeze_backbone=True)
    model, result = marlhf.fit_or_keep(records, args, iteration=1, source=TINY, newest=None)
    assert model is not None and result.train_pairs == 4
    fresh = marlhf.new_reward_model(args, TINY, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.backbone.parameters(), fresh.backbone.parameters(), strict=True))
    assert not torch.equal(model.head.weight, fresh.head.weight)


def test_who_labels_the_pairs(oracle) -> None:
    learned = open_reward_model(TINY, 2)
    asked = config(preference_scoring_reward="reward_model")
    assert marlhf.scoring_oracle(asked, oracle, None) is oracle  # until there is one
    assert marlhf.scoring_oracle(asked, oracle, learned).name == "reward_model"
    assert marlhf.scoring_oracle(config(), oracle, learned) is oracle
    assert marlhf.scoring_oracle(MARLHFConfig(**SETTINGS), oracle, learned) is oracle


@pytest.mark.parametrize("backend", ["magrpo", "marloo", "maremax", "mareinforce"])
def test_every_backend_updates(team, records, backend) -> None:
    args = config(rl_algorithm=backend, advantage_normalization=False)
    before = team.fingerprint()
    model, _ = marlhf.fit_or_keep(records, args, iteration=1, source=TINY, newest=None)
    assert model is not None
    assert marlhf.backend_settings(args).advantage_mode == args.baseline()
    marlhf.update_policies(team, make_engines(team, args), TASKS, model, args, iteration=1, learned=Learned([], 0))
    assert team.fingerprint() != before


def test_reference_kl_needs_the_reference_and_is_0_before_the_first_step(team, records) -> None:
    args = config(reference_kl_enabled=True, reference_kl_coef=0.5, rollout_buffer_size=4)
    model, _ = marlhf.fit_or_keep(records, args, iteration=1, source=TINY, newest=None)
    assert model is not None
    engines = make_engines(team, args)
    with pytest.raises(ConfigError, match="reference"):
        marlhf.update_policies(team, engines, TASKS, model, args, iteration=1, learned=Learned([], 0))
    seen: list[dict] = []
    hooks = marlhf.Hooks(on_rollout=lambda metrics, steps: seen.append(metrics))
    marlhf.update_policies(
        team,
        engines,
        TASKS,
        model,
        args,
        iteration=1,
        learned=Learned([], 0),
        reference=team.copy(),
        hooks=hooks,
    )
    assert seen[0]["kl/agent_1"] == pytest.approx(0.0, abs=1e-6)
    assert marlhf.needs_reference(args)
    assert not marlhf.needs_reference(config(reference_kl_enabled=True, reference_kl_coef=0.0))


def test_a_saved_model_scores_as_before(records, tmp_path) -> None:
    args = config()
    model, _ = marlhf.fit_or_keep(records, args, iteration=1, source=TINY, newest=None)
    assert model is not None
    save_reward_model(model, tmp_path / "reward_model")
    assert marlhf.fitted_reward_model(args, tmp_path / "reward_model").fingerprint() == model.fingerprint()


def test_the_base(tmp_path) -> None:
    assert marlhf.base_source(config(), [TINY, "other"]) == TINY
    assert marlhf.base_source(config(reward_model_name="x"), [None]) == "x"
    with pytest.raises(ConfigError, match="reward_model_name is needed"):
        marlhf.base_source(config(), [None, None])


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("builtin:huge", {}, "reward_model_name: there is no model 'builtin:huge'"),
        ("./nowhere", {}, "reward_model_name: there is no model folder"),
        (TINY, {"reward_max_length": 1025}, "reward_max_length 1025 is above the context of 'builtin:tiny', 1024"),
    ],
)
def test_an_absent_base_is_refused_before_any_work(source, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        marlhf.check_base(config(**changes), source)


def test_a_hub_name_that_cannot_be_had(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not a model identifier listed on the hub")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match="'no-such/model' cannot be loaded: not a model identifier"):
        marlhf.check_base(config(), "no-such/model")


def test_two_runs_of_an_iteration_give_the_same_bytes(oracle, records, caplog) -> None:
    caplog.set_level(logging.WARNING)
    prints = set()
    for _ in range(2):
        team = load_team(agent_model=TINY, num_agents=2, formatters="{prompt}\n")
        args = config(num_train_epochs=2)
        outcome = marlhf.learn(team, make_engines(team, args), TASKS, records, oracle, args, iteration=1, source=TINY)
        assert outcome.model is not None
        prints.add((team.fingerprint(), outcome.model.fingerprint()))
    assert len(prints) == 1
