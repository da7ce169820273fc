"""From records to updated policies."""

import json
import logging
import math
from pathlib import Path

import pytest

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.algorithms.preference_learning import (
    UPDATES,
    Learned,
    learn,
    load_training_state,
    make_engines,
    pair_tokens,
    sampling,
    save_training_state,
)
from comlrl_core.errors import DataError
from comlrl_core.preference.records import PairRecord
from comlrl_core.store import PROGRESS
from comlrl_core.team.team import Team, load_team


def make_team(seed: int = 2) -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, seed=seed)


def config(**changes) -> MADPOConfig:
    settings = {
        "agent_learning_rate": 1e-3,
        "rollout_buffer_size": 2,
        "num_train_epochs": 1,
        "max_new_tokens": 8,
        "top_p": 1.0,
        "top_k": None,
    }
    return MADPOConfig(**{**settings, **changes})


def record(number: int = 0, **changes) -> PairRecord:
    fields = {
        "prompts": (f"the bird {number}", f"a bird {number}"),
        "winner_completions": ("sings", f"flies {number}"),
        "loser_completions": ("hides", "sleeps"),
        "winner_reward": 1.0,
        "loser_reward": 0.0,
        "candidate_reward_mean": 0.5,
        "task_id": f"t{number}",
    }
    return PairRecord(**{**fields, **changes})


RECORDS = [record(i) for i in range(5)]


def test_sampling_is_read_from_the_settings() -> None:
    found = sampling(config(temperature=0.7, top_p=0.9, top_k=5))
    assert (found.max_new_tokens, found.temperature, found.top_p, found.top_k) == (8, 0.7, 0.9, 5)


def test_iterated_pairs_come_back_as_other_tokens() -> None:
    """Pitfall 4: ids are trained on as they were sampled, though their text would be encoded otherwise."""
    team = make_team()
    eos = team.agents[0].eos_ids[0]
    whole = team.agents[0].encode_completion("the river", False)
    split = tuple(team.agents[0].encode_completion("t", False)) + tuple(
        team.agents[0].encode_completion("he river", False)
    )
    assert list(split) != list(whole) and team.decode(split, 0) == "the river"
    found = pair_tokens(
        record(
            winner_completions=("the river", "x"),
            winner_token_ids=((*split, eos), (7,)),
            loser_token_ids=((9, eos), (8, 8)),
        ),
        team,
        8,
    )
    assert found.winners == ((*split, eos), (7,))
    assert found.losers == ((9, eos), (8, 8))
    assert found.prompts == tuple(tuple(a.encode_prompt(p)) for a, p in zip(team.agents, record().prompts, strict=True))


def test_text_alone_loses_its_eos() -> None:
    """Pitfall 4: one EOS is appended, unless the record says that the completion was cut off."""
    team = make_team()
    eos = team.agents[0].eos_ids[0]
    text = tuple(team.agents[0].encode_completion("sings", False))
    assert pair_tokens(record(), team, 8).winners[0] == (*text, eos)
    cut = pair_tokens(record(winner_finished=(False, True)), team, 8)
    assert cut.winners[0] == text and cut.winners[1][-1] == eos


def test_a_record_of_another_team_is_named() -> None:
    team = load_team(agent_model="builtin:tiny", num_agents=1, seed=1)
    with pytest.raises(DataError, match="task t0: 2 prompts for 1 agents"):
        pair_tokens(record(), team, 8)


def test_updates_move_every_agent_and_count_environment_steps() -> None:
    team = make_team()
    before = team.fingerprint()
    told: list[tuple[int, int]] = []
    learned = learn(
        team,
        make_engines(team, config()),
        RECORDS,
        config(num_train_epochs=2, environment_steps_per_pair=3),
        iteration=4,
        environment_steps=100,
        on_step=lambda metrics, steps: told.append((metrics["environment_steps"], steps)),
    )
    assert team.fingerprint() != before
    assert [metrics["pairs"] for metrics in learned.history] == [2, 2, 1, 2, 2, 1]
    assert [steps for _, steps in told] == [106, 112, 115, 121, 127, 130]
    assert all(one == other for one, other in told) and learned.environment_steps == 130
    assert {metrics["iteration"] for metrics in learned.history} == {4}
    assert learned.history[0]["loss"] != learned.history[-1]["loss"]


def test_the_order_of_pairs_comes_from_seed_and_iteration() -> None:
    def weights(**changes) -> str:
        team = make_team()
        settings = config(seed=changes.get("seed", 0))
        learn(team, make_engines(team, settings), RECORDS, settings, iteration=changes.get("iteration", 1))
        return team.fingerprint()

    assert weights() == weights()
    assert len({weights(), weights(seed=1), weights(iteration=2)}) == 3


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 25.0)],  # ipo: (0 - 1 / (2 x 0.1))^2
)
@pytest.mark.parametrize("reference", ["previous", "initial"])
def test_at_the_start_the_reference_is_the_team_itself(loss_type: str, expected: float, reference: str) -> None:
    """Every margin is 0 in the first minibatch, and later ones are not."""
    settings = config(loss_type=loss_type, reference=reference, dpo_beta=0.1)
    team, asked = make_team(), []

    def load_initial() -> Team:
        asked.append(1)
        return make_team()

    learned = learn(team, make_engines(team, settings), RECORDS, settings, iteration=1, load_initial=load_initial)
    first, last = learned.history[0], learned.history[-1]
    assert first["margin"] == pytest.approx(0.0, abs=1e-4) and first["loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(last["margin"]) > 1e-4
    assert len(asked) == (reference == "initial")


def test_without_a_reference_the_margin_is_the_teams_own() -> None:
    team = make_team()
    learned = learn(team, make_engines(team, config()), RECORDS, config(), iteration=1)
    assert abs(learned.history[0]["margin"]) > 1e-3


def test_the_initial_policies_must_have_been_kept() -> None:
    team, settings = make_team(), config(reference="initial")
    with pytest.raises(DataError, match="reference: initial needs the run's initial policies"):
        learn(team, make_engines(team, settings), RECORDS, settings, iteration=1)


def test_no_pairs_leave_the_policies_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    team = make_team()
    before = team.fingerprint()
    with caplog.at_level(logging.WARNING):
        learned = learn(team, make_engines(team, config()), [], config(reference="initial"), iteration=3)
    assert learned == Learned([], 0) and team.fingerprint() == before
    assert "iteration 3: there are no pairs" in caplog.text


def test_a_shared_model_given_twice_gets_two_optimizers() -> None:
    """Pitfall 19: one engine, hence one optimizer, and its state is written once."""
    model = make_team().models[0]
    tokenizer = make_team().agents[0].tokenizer
    team = load_team(agents=[model, model], tokenizer=tokenizer)
    engines = make_engines(team, config())
    assert engines[0] is engines[1]
    assert len({id(engine) for engine in make_engines(make_team(), config())}) == 2


def trained(settings: MADPOConfig) -> tuple[Team, list, Learned]:
    team = make_team()
    engines = make_engines(team, settings)
    return team, engines, learn(team, engines, RECORDS, settings, iteration=1)


@pytest.mark.parametrize("optimizer_state", ["carry", "reset"])
def test_the_next_iteration_goes_on_from_the_saved_state(tmp_path: Path, optimizer_state: str) -> None:
    """Pitfall 26: moments that carry over are restored bit for bit; others begin anew on both ways."""
    settings = config(optimizer_state=optimizer_state)
    team, engines, learned = trained(settings)
    save_training_state(tmp_path, engines, settings, 1, learned)
    assert (tmp_path / "engine_0").exists() == (tmp_path / "engine_1").exists() == (optimizer_state == "carry")
    assert len((tmp_path / UPDATES).read_text().splitlines()) == len(learned.history) == 3

    restored = team.copy()
    for model in restored.models:
        model.requires_grad_(True)
    fresh = make_engines(restored, settings)
    assert load_training_state(tmp_path, fresh, settings) == learned.environment_steps == 10
    if optimizer_state == "reset":
        engines = make_engines(team, settings)
    learn(team, engines, RECORDS, settings, iteration=2)
    learn(restored, fresh, RECORDS, settings, iteration=2)
    assert restored.fingerprint() == team.fingerprint()


def test_saved_states_are_strict_json_and_the_same_bytes(tmp_path: Path) -> None:
    settings = config()
    _, engines, learned = trained(settings)
    learned.history[0]["loss"] = math.nan
    for folder in ("one", "two"):
        save_training_state(tmp_path / folder, engines, settings, 1, learned)
    assert json.loads((tmp_path / "one" / UPDATES).read_text().splitlines()[0])["loss"] is None
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_the_initial_state_has_no_moments(tmp_path: Path) -> None:
    team = make_team()
    save_training_state(tmp_path, [], MADPOIterConfig(), 0, Learned([], 0))
    assert load_training_state(tmp_path, make_engines(team, config()), config()) == 0


def test_a_damaged_counter_is_named(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text('{"environment_steps": "many"}')
    with pytest.raises(DataError, match=r"progress\.json: environment_steps must be a whole number, not 'many'"):
        load_training_state(tmp_path, [], config())
