"""Fitting: what is learned from, what is measured, and what is left out."""

import math

import pytest
import torch

from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.preference.reward_model import FitSettings, JointText, fit, open_reward_model
from comlrl_core.preference.reward_model.diagnostics import is_held_out
from comlrl_core.preference.reward_model.encoding import task_of
from comlrl_core.randomness import generator


def in_turn(epoch: int, count: int) -> range:
    return range(count)


def shuffled(epoch: int, count: int) -> list[int]:
    return generator("test", epoch).permutation(count).tolist()


def test_first_loss_by_hand(tiny, records, make_engine) -> None:
    """With a head of zeros every score is 0: a loss of ln 2, half of the pairs right."""
    with torch.no_grad():
        tiny.head.weight.zero_()
    result = fit(tiny, make_engine(), records[:4], FitSettings(4, eval_fraction=0.0), order=in_turn)
    (step,) = result.history
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (step["accuracy"], step["margin"], step["pairs"]) == (0.5, 0.0, 4)
    assert result.train_pairs == 4


def test_learns_which_side_wins_also_on_held_out_tasks(tiny, records, make_engine) -> None:
    settings = FitSettings(8, num_train_epochs=3, eval_fraction=0.3)
    result = fit(tiny, make_engine(), records, settings, order=shuffled)
    kept_out = [record for record in records if is_held_out(task_of(record), 0.3)]
    assert 0 < len(kept_out) < len(records)
    assert result.train_pairs == len(records) - len(kept_out)
    assert result.held_out is not None
    assert result.held_out.pairs == len({(r.task_id, r.winner_completions, r.loser_completions) for r in kept_out})
    assert result.held_out.accuracy == 1.0
    row = result.metrics()
    assert row["heldout_accuracy"] == 1.0 and row["train_accuracy"] > 0.9


def test_held_out_tasks_are_never_learned_from(records, make_engine) -> None:
    """The same weights come out when the held-out tasks' pairs are not there."""
    settings = FitSettings(8, eval_fraction=0.3)
    kept = [record for record in records if not is_held_out(task_of(record), 0.3)]
    prints = []
    for given in (records, kept):
        model = open_reward_model("builtin:tiny", 2)
        fit(model, make_engine(), given, settings, order=shuffled)
        prints.append(model.fingerprint())
    assert prints[0] == prints[1]


def test_pairs_that_replay_drew_twice_are_measured_once(tiny, records, make_engine) -> None:
    settings = FitSettings(8, eval_fraction=0.3)
    once = fit(tiny, make_engine(), records, settings, order=shuffled)
    twice = fit(open_reward_model("builtin:tiny", 2), make_engine(), records * 2, settings, order=shuffled)
    assert once.held_out is not None and twice.held_out is not None
    assert twice.held_out.pairs == once.held_out.pairs


def test_micro_batches_change_nothing(records, make_engine) -> None:
    models = []
    for micro in (None, 3):
        model = open_reward_model("builtin:tiny", 2).double()
        fit(model, make_engine(), records[:8], FitSettings(8, micro, eval_fraction=0.0), order=in_turn)
        models.append(model)
    for first, second in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-8)


def test_the_same_fit_gives_the_same_bytes(records, make_engine) -> None:
    prints = set()
    for _ in range(2):
        model = open_reward_model("builtin:tiny", 2, seed=3, head_seed=4)
        fit(model, make_engine(), records, FitSettings(8, eval_fraction=0.2), order=shuffled)
        prints.add(model.fingerprint())
    assert len(prints) == 1


def test_scores_of_the_training_pairs_have_a_mean_of_zero(tiny, records, make_engine) -> None:
    fit(tiny, make_engine(), records, FitSettings(8, eval_fraction=0.0), order=shuffled)
    sides = [JointText(r.prompts, s) for r in records for s in (r.winner_completions, r.loser_completions)]
    scores = [score for score in tiny.score(list(dict.fromkeys(sides))) if score is not None]
    assert math.fsum(scores) / len(scores) == pytest.approx(0.0, abs=1e-5)
    assert max(scores) > 0 > min(scores)


def test_a_frozen_backbone_stays_bit_identical(tiny, records, make_engine) -> None:
    before = {name: t.clone() for name, t in tiny.backbone.state_dict().items()}
    head = tiny.head.weight.detach().clone()
    fit(tiny.freeze_backbone(), make_engine(), records[:8], FitSettings(4, eval_fraction=0.0), order=in_turn)
    assert all(torch.equal(before[name], t) for name, t in tiny.backbone.state_dict().items())
    assert not torch.equal(head, tiny.head.weight)


def test_nothing_to_learn_from_leaves_the_model_as_it_is(tiny, pair) -> None:
    def no_engine(model: object) -> LocalEngine:
        raise AssertionError("no optimizer is needed")

    before = tiny.fingerprint()
    result = fit(tiny, no_engine, [], FitSettings(), order=in_turn)
    assert (result.history, result.train_pairs, result.held_out) == ([], 0, None)
    assert result.metrics() == {
        "train_pairs": 0.0, "dropped_too_long": 0.0, "dropped_equal_sides": 0.0, "heldout_pairs": 0.0
    }  # fmt: skip
    short = open_reward_model("builtin:tiny", 2, max_length=30)
    long = pair("t", ("X" * 40, "Z"), ("Z", "X"))
    assert fit(short, no_engine, [long], FitSettings(), order=in_turn).dropped["too_long"] == 1
    assert tiny.fingerprint() == before


def test_tasks_that_are_all_held_out_are_learned_from(tiny, records, make_engine, caplog) -> None:
    """One task in the held-out share would leave nothing to fit, in every iteration."""
    kept_out = [record for record in records if is_held_out(task_of(record), 0.3)][:1]
    result = fit(tiny, make_engine(), kept_out, FitSettings(eval_fraction=0.3), order=in_turn)
    assert result.train_pairs == 1 and result.held_out is None
    assert "held-out share" in caplog.text


def test_dropout_is_off(any_model, records, make_engine) -> None:
    """At a learning rate of 0 the loss of a pair is the same in every epoch."""
    settings = FitSettings(1, num_train_epochs=3, eval_fraction=0.0)
    result = fit(any_model.train(), make_engine(0.0), records[:1], settings, order=in_turn)
    assert len({step["loss"] for step in result.history}) == 1
    assert any_model.backbone.training  # put back as it was


def test_winner_and_loser_in_one_forward(tiny, records) -> None:
    calls = []
    tiny.register_forward_pre_hook(
        lambda module, given: calls.append(len(given[0])) if torch.is_grad_enabled() else None
    )
    engine = LocalEngine(tiny, OptimizerSettings(1e-3))
    fit(tiny, lambda _: engine, records[:4], FitSettings(4, eval_fraction=0.0), order=in_turn)
    assert calls == [8]


@pytest.mark.parametrize("on_nonfinite", ["fail", "skip"])
def test_a_loss_that_is_not_finite(tiny, records, make_engine, on_nonfinite) -> None:
    """`fail` ends at once, `skip` at the third in a row; the weights were not stepped."""
    with torch.no_grad():
        tiny.head.weight.fill_(math.nan)
    backbone = {name: t.clone() for name, t in tiny.backbone.state_dict().items()}
    seen: list[dict] = []
    with pytest.raises(TrainingError, match="loss of the reward model is not finite"):
        settings = FitSettings(4, eval_fraction=0.0, on_nonfinite=on_nonfinite)
        fit(tiny, make_engine(), records, settings, order=in_turn, on_step=seen.append)
    assert len(seen) == (1 if on_nonfinite == "fail" else 3)
    assert all(step["skipped"] for step in seen)
    assert all(torch.equal(backbone[name], t) for name, t in tiny.backbone.state_dict().items())


def test_an_order_that_is_no_permutation(tiny, records, make_engine) -> None:
    with pytest.raises(DataError, match="no permutation"):
        fit(tiny, make_engine(), records, FitSettings(eval_fraction=0.0), order=lambda epoch, count: [0] * count)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"center_rewards_coef": math.nan}, "center_rewards_coef"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite"),
    ],
)
def test_settings_out_of_bounds(settings: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FitSettings(**settings)
