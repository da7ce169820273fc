"""MADPO: the joint gradient, invariances, and what happens when a batch is bad."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from comlrl_core.algorithms.madpo import (
    MADPOUpdateSettings,
    PairTokens,
    falling_logps_warning,
    num_steps,
    pair_margins,
    reference_margins,
    update,
)
from comlrl_core.engine.local import LocalEngine, build_engines
from comlrl_core.engine.protocol import Engine, OptimizerSettings, StepResult
from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.rl.preference import preference_loss
from comlrl_core.team.scoring import scoring_mode

VOCABULARY, PAD, EOS = 19, 0, 2


def policy(seed: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> GPT2LMHeadModel:
    """GPT-2: its layer norms stay in fp64 under fp64 weights; the RMS norms of Qwen2 and Llama do not."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.4,
    )
    model = GPT2LMHeadModel(config)
    return model.double() if dtype == torch.float64 else model


def make_pairs(count: int, agents: int, seed: int = 0) -> list[PairTokens]:
    """Prompts of 1 to 5 tokens, completions of 1 to 8, each ended by EOS."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int, end: tuple[int, ...] = ()) -> tuple[int, ...]:
        length = int(torch.randint(1, most + 1, (), generator=generator)) - len(end)
        return (*torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(), *end)

    def side() -> tuple[tuple[int, ...], ...]:
        return tuple(ids(8, (EOS,)) for _ in range(agents))

    return [PairTokens(tuple(ids(5) for _ in range(agents)), side(), side()) for _ in range(count)]


class Recorder:
    """An engine that keeps the accumulated gradient instead of stepping."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradient: list[Tensor] = []

    def begin(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> StepResult:
        self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.zero_grad()
        return StepResult(math.sqrt(sum(g.square().sum().item() for g in self.gradient)), 0.0, False)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def save_state(self, directory: Path) -> None: ...

    def load_state(self, directory: Path) -> None: ...


def in_order(count: int) -> Callable[[int], Sequence[int]]:
    return lambda epoch: range(count)


def run(models: Sequence[nn.Module], engines: Sequence[Engine], pairs: list[PairTokens], **settings: Any) -> list[dict]:
    reference = settings.pop("reference", None)
    order = settings.pop("order", in_order(len(pairs)))
    on_step = settings.pop("on_step", None)
    start_epoch = settings.pop("start_epoch", 0)
    return update(
        models,
        engines,
        [PAD] * len(models),
        pairs,
        MADPOUpdateSettings(**settings),
        reference=reference,
        order=order,
        on_step=on_step,
        start_epoch=start_epoch,
    )


def gradients(models: Sequence[nn.Module], pairs: list[PairTokens], **settings: Any) -> tuple[list[list[Tensor]], dict]:
    """The gradient of every agent's model for one minibatch of all pairs, and its metrics."""
    recorders = {id(model): Recorder(model) for model in models}
    engines = [recorders[id(model)] for model in models]
    history = run(models, engines, pairs, train_batch_size=len(pairs), **settings)
    return [engine.gradient for engine in engines], history[0]


def joint_gradients(
    models: Sequence[nn.Module], pairs: list[PairTokens], beta: float = 0.1, loss_type: Any = "sigmoid"
) -> tuple[list[list[Tensor]], float]:
    """Autograd of the one joint loss, one pair at a time."""
    loss = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        margins = [pair_margins(m, [pair], i, PAD, loss_type == "ipo")[0] for i, m in enumerate(models)]
        loss = loss + preference_loss(torch.stack(margins).sum(dim=0), beta, loss_type).sum() / len(pairs)
    flat = [parameter for model in models for parameter in model.parameters()]
    found = iter(torch.autograd.grad(loss, flat))
    return [[next(found) for _ in model.parameters()] for model in models], loss.item()


def assert_gradients_equal(found: list[list[Tensor]], expected: list[list[Tensor]], atol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


# --- the gradient


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_two_agents_get_the_gradient_of_the_joint_loss(loss_type: Any) -> None:
    models, pairs = [policy(0), policy(1)], make_pairs(5, 2)
    with scoring_mode(*models):
        expected, loss = joint_gradients(models, pairs, 0.3, loss_type)
    found, metrics = gradients(models, pairs, beta=0.3, loss_type=loss_type)
    assert_gradients_equal(found, expected, atol=1e-12)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-12)
    assert any(g.abs().max() > 1e-3 for g in expected[0])


def test_agents_that_share_a_model_get_the_sum_of_their_gradients() -> None:
    """One model in both roles: the derivative of the joint loss runs through both margins."""
    shared, pairs = policy(0), make_pairs(5, 2)
    with scoring_mode(shared):
        margins = [pair_margins(shared, pairs, agent, PAD)[0] for agent in range(2)]
        expected = torch.autograd.grad(preference_loss(margins[0] + margins[1], 0.1).mean(), list(shared.parameters()))
    found, _ = gradients([shared, shared], pairs)
    assert_gradients_equal([found[0]], [list(expected)], atol=1e-12)


def test_weight_is_the_teams_direction_its_own() -> None:
    """grad_i = -beta sigmoid(-beta D) grad D_i for one pair, with D the sum over both agents."""
    models, pairs = [policy(0), policy(1)], make_pairs(1, 2)
    with scoring_mode(*models):
        margins = [pair_margins(model, pairs, agent, PAD)[0] for agent, model in enumerate(models)]
        weight = -0.1 * torch.sigmoid(-0.1 * (margins[0] + margins[1])).item()
        own = torch.autograd.grad(margins[1].sum(), list(models[1].parameters()))
    found, _ = gradients(models, pairs)
    assert_gradients_equal([found[1]], [[weight * g for g in own]], atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, None)])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_batch_8_equals_8_micro_batches_of_1(dtype: torch.dtype, atol: float | None, loss_type: Any) -> None:
    """Unequal lengths; also 3, which leaves a smaller last one. In fp32: 1e-5 of the largest entry."""
    models, pairs = [policy(0, dtype), policy(1, dtype)], make_pairs(8, 2)
    whole, metrics = gradients(models, pairs, loss_type=loss_type)
    scale = max(g.abs().max().item() for agent in whole for g in agent)
    for micro in (1, 3):
        found, parts = gradients(models, pairs, loss_type=loss_type, micro_batch_size=micro)
        assert_gradients_equal(found, whole, atol=atol or 1e-5 * scale)
        assert parts == pytest.approx(metrics, rel=1e-4)


def test_a_smaller_last_minibatch_is_the_mean_over_its_own_pairs() -> None:
    models, pairs = [policy(0)], make_pairs(3, 1)
    recorder = Recorder(models[0])
    history = run(models, [recorder], pairs, train_batch_size=2)
    expected, _ = gradients(models, pairs[2:])
    assert [metrics["pairs"] for metrics in history] == [2, 1]
    assert_gradients_equal([recorder.gradient], expected, atol=1e-12)


def test_winner_and_loser_share_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward per agent and micro-batch, before any backward: sharded engines refuse a second one."""
    models, pairs = [policy(0), policy(1)], make_pairs(4, 2)
    events: list[str] = []
    for agent, model in enumerate(models):
        model.register_forward_hook(lambda *_, agent=agent: events.append(f"forward {agent}"))
    engines = [Recorder(model) for model in models]
    for agent, engine in enumerate(engines):
        monkeypatch.setattr(engine, "backward", lambda loss, agent=agent: events.append(f"backward {agent}"))
    run(models, engines, pairs, train_batch_size=4)
    assert events == ["forward 0", "forward 1", "backward 0", "backward 1"]


# --- reference


def test_at_step_0_the_margin_over_the_reference_is_zero_even_with_dropout() -> None:
    """The policies are the reference: every margin is 0, the loss ln 2. Dropout left on would show here."""
    models, pairs = [policy(0, dropout=0.5).train(), policy(1, dropout=0.5).train()], make_pairs(6, 2)
    reference = reference_margins(models, pairs, [PAD, PAD], batch_size=6)
    assert reference.shape == (6, 2) and not reference.requires_grad
    assert all(model.training for model in models)
    _, metrics = gradients(models, pairs, reference=reference)
    assert metrics["margin"] == 0.0
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-15)


@pytest.mark.parametrize("normalised", [False, True])
def test_reference_margins_do_not_depend_on_the_batch(normalised: bool) -> None:
    models, pairs = [policy(0), policy(1)], make_pairs(7, 2)
    alone = reference_margins(models, pairs, [PAD, PAD], 1, normalised)
    torch.testing.assert_close(reference_margins(models, pairs, [PAD, PAD], 3, normalised), alone, rtol=0, atol=1e-12)
    expected = pair_margins(models[1].eval(), pairs, 1, PAD, normalised)[0]
    torch.testing.assert_close(alone[:, 1], expected.detach(), rtol=0, atol=1e-12)


def test_the_references_margin_is_subtracted_pair_by_pair() -> None:
    """A reference shifted by c shifts every joint margin by -c, whatever order and micro-batches do."""
    models, pairs = [policy(0), policy(1)], make_pairs(5, 2)
    plain, _ = run_metrics(models, pairs, None)
    shift = torch.arange(10, dtype=torch.float64).view(5, 2)
    shifted, per_pair = run_metrics(models, pairs, shift)
    assert shifted == pytest.approx(plain - shift.sum(dim=1).mean().item(), abs=1e-12)
    assert per_pair[3] == pytest.approx(run_metrics(models, pairs, None)[1][3] - 13.0, abs=1e-12)


def run_metrics(
    models: Sequence[nn.Module], pairs: list[PairTokens], reference: Tensor | None
) -> tuple[float, list[float]]:
    """The mean joint margin, and (by minibatches of one, visited backwards) each pair's."""
    engines = [Recorder(model) for model in models]
    backwards = {"order": lambda epoch: range(len(pairs) - 1, -1, -1), "reference": reference}
    whole = run(models, engines, pairs, train_batch_size=len(pairs), micro_batch_size=2, **backwards)
    single = run(models, engines, pairs, train_batch_size=1, **backwards)
    return whole[0]["margin"], [metrics["margin"] for metrics in single][::-1]


# --- training


def test_metrics_by_hand() -> None:
    models, pairs = [policy(0), policy(1)], make_pairs(4, 2)
    with scoring_mode(*models), torch.no_grad():
        scored = [pair_margins(model, pairs, agent, PAD) for agent, model in enumerate(models)]
    found, metrics = gradients(models, pairs)
    joint = scored[0][0] + scored[1][0]
    assert metrics == pytest.approx(
        {
            "loss": preference_loss(joint, 0.1).mean().item(),
            "margin": joint.mean().item(),
            "accuracy": (joint > 0).double().mean().item(),
            "winner_logps": (scored[0][1] + scored[1][1]).mean().item(),
            "loser_logps": (scored[0][2] + scored[1][2]).mean().item(),
            "agent_0/margin": scored[0][0].mean().item(),
            "agent_1/margin": scored[1][0].mean().item(),
            "agent_0/grad_norm": math.sqrt(sum(g.square().sum().item() for g in found[0])),
            "agent_1/grad_norm": math.sqrt(sum(g.square().sum().item() for g in found[1])),
            "grad_norm": math.sqrt(sum(g.square().sum().item() for agent in found for g in agent)),
            "learning_rate": 0.0,
            "pairs": 4,
            "masked_pairs": 0,
            "epoch": 0,
            "step": 0,
            "skipped": 0,
        },
        abs=1e-12,
    )


def test_the_team_learns_its_pairs() -> None:
    models, pairs = [policy(0, torch.float32), policy(1, torch.float32)], make_pairs(8, 2)
    engines = build_engines(models, OptimizerSettings(1e-2))
    seen: list[dict] = []
    history = run(models, engines, pairs, train_batch_size=4, num_train_epochs=10, on_step=seen.append)
    assert seen == history and len(history) == num_steps(
        8, MADPOUpdateSettings(train_batch_size=4, num_train_epochs=10)
    )
    assert [metrics["step"] for metrics in history] == list(range(20))
    assert history[-1]["loss"] < 0.3 < history[0]["loss"]
    assert history[-1]["accuracy"] == 1.0


def test_a_shared_model_is_stepped_once_per_minibatch() -> None:
    shared, pairs = policy(0, torch.float32), make_pairs(4, 2)
    engines = build_engines([shared, shared], OptimizerSettings(1e-2, lr_schedule="linear"))
    history = run([shared, shared], engines, pairs, train_batch_size=2)
    assert [metrics["learning_rate"] for metrics in history] == [1e-2, 5e-3]
    assert history[0]["agent_0/grad_norm"] == history[0]["agent_1/grad_norm"] == history[0]["grad_norm"]


def test_interrupted_after_an_epoch_equals_uninterrupted(tmp_path: Path) -> None:
    """Two epochs of a cosine schedule, saved between and loaded into new objects: the same bytes."""
    settings = OptimizerSettings(1e-2, lr_schedule="cosine")
    pairs, shuffles = make_pairs(6, 2), [[3, 1, 4, 0, 5, 2], [0, 5, 2, 4, 3, 1]]
    common: dict[str, Any] = {"train_batch_size": 2, "num_train_epochs": 2, "order": shuffles.__getitem__}
    models = [policy(0, torch.float32), policy(1, torch.float32)]
    engines = build_engines(models, settings)

    def save(metrics: dict) -> None:
        if metrics["step"] == 2:  # the last minibatch of epoch 0
            for agent, (model, engine) in enumerate(zip(models, engines, strict=True)):
                engine.save_state(tmp_path / str(agent))
                torch.save(model.state_dict(), tmp_path / f"{agent}.pt")

    whole = run(models, engines, pairs, **common, on_step=save)
    resumed = [policy(7, torch.float32), policy(8, torch.float32)]
    for agent, model in enumerate(resumed):
        model.load_state_dict(torch.load(tmp_path / f"{agent}.pt"))
    fresh = build_engines(resumed, settings)
    for agent, engine in enumerate(fresh):
        engine.load_state(tmp_path / str(agent))
    assert run(resumed, fresh, pairs, **common, start_epoch=1) == whole[3:]
    for model, expected in zip(resumed, models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_no_pairs_change_nothing() -> None:
    model = policy(0)
    assert run([model], [LocalEngine(model, OptimizerSettings(1e-2))], []) == []
    assert reference_margins([model], [], [PAD], 4).shape == (0, 1)


# --- bad batches


def poisoned(pairs: list[PairTokens], *bad: int) -> Tensor:
    reference = torch.zeros(len(pairs), 1, dtype=torch.float64)
    reference[list(bad)] = math.nan
    return reference


def test_a_nonfinite_loss_fails_and_names_the_batch() -> None:
    model, pairs = policy(0), make_pairs(6, 1)
    before = [p.clone() for p in model.parameters()]
    engine = LocalEngine(model, OptimizerSettings(1e-2))
    with pytest.raises(TrainingError, match=r"loss of epoch 0, minibatch 0 \(pairs 0, 1, 2\) is not finite"):
        run([model], [engine], pairs, train_batch_size=3, micro_batch_size=1, reference=poisoned(pairs, 2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_nonfinite_minibatch_is_skipped_whole_and_counted() -> None:
    """Pair 2 is bad: its minibatch, with the good pairs 0 and 1, leaves no trace in the one after it."""
    pairs = make_pairs(6, 1)
    model, clean = policy(0), policy(0)
    history = run(
        [model],
        [LocalEngine(model, OptimizerSettings(1e-2))],
        pairs,
        train_batch_size=3,
        micro_batch_size=1,
        on_nonfinite="skip",
        reference=poisoned(pairs, 2),
    )
    run(
        [clean],
        [LocalEngine(clean, OptimizerSettings(1e-2))],
        pairs[3:],
        train_batch_size=3,
        micro_batch_size=1,
    )
    assert [metrics["skipped"] for metrics in history] == [1, 0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


def test_three_nonfinite_minibatches_in_a_row_end_the_run_even_under_skip() -> None:
    """Bad are 0, 1, 3, 4, 5: two in a row are survived, the three from 3 on are not."""
    model, pairs = policy(0), make_pairs(7, 1)
    seen: list[dict] = []
    with pytest.raises(TrainingError, match=r"minibatch 5 \(pairs 5\) is not finite, nor were the 2 before it"):
        run(
            [model],
            [LocalEngine(model, OptimizerSettings(1e-2))],
            pairs,
            train_batch_size=1,
            on_nonfinite="skip",
            reference=poisoned(pairs, 0, 1, 3, 4, 5),
            on_step=seen.append,
        )
    assert [metrics["skipped"] for metrics in seen] == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("on_nonfinite", ["fail", "skip"])
def test_a_nonfinite_gradient_of_one_agent_stops_the_whole_team(on_nonfinite: Any) -> None:
    """The loss is finite, the first agent's gradient is not: no agent is stepped."""
    models, pairs = [policy(0), policy(1)], make_pairs(2, 2)
    next(models[0].parameters()).register_hook(lambda grad: grad * math.inf)
    before = [p.clone() for model in models for p in model.parameters()]
    engines = build_engines(models, OptimizerSettings(1e-2))
    if on_nonfinite == "fail":
        with pytest.raises(TrainingError, match="gradient of epoch 0"):
            run(models, engines, pairs)
    else:
        assert run(models, engines, pairs, on_nonfinite="skip")[0]["skipped"] == 1
    after = [p for model in models for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_pairs_without_a_token_give_zero_loss_and_are_counted() -> None:
    """Nothing to score on either side: not 0/0, not ln 2, no step; the mean is over the other pairs."""
    empty = PairTokens(((5,),), ((),), ((),))
    for loss_type in ("sigmoid", "ipo"):
        model = policy(0)
        before = [p.clone() for p in model.parameters()]
        history = run([model], [LocalEngine(model, OptimizerSettings(1e-2))], [empty, empty], loss_type=loss_type)
        assert history[0]["loss"] == 0.0 and history[0]["masked_pairs"] == 2 and history[0]["skipped"] == 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    pairs = make_pairs(3, 1)
    mixed, metrics = gradients([policy(0)], [pairs[0], empty, *pairs[1:]], loss_type="ipo")
    assert metrics["masked_pairs"] == 1 and metrics["pairs"] == 4
    assert_gradients_equal(mixed, gradients([policy(0)], pairs, loss_type="ipo")[0], atol=1e-12)


def test_an_agent_that_said_nothing_on_either_side_gets_a_zero_gradient() -> None:
    pair = replace(make_pairs(1, 2)[0], winners=((), (7, EOS)), losers=((), (8, EOS)))
    _, metrics = gradients([policy(0), policy(1)], [pair], loss_type="ipo")
    assert metrics["agent_0/margin"] == 0.0 and metrics["agent_0/grad_norm"] == 0.0
    assert metrics["agent_1/grad_norm"] > 0.0


# --- falling log-probabilities


def steps(winners: list[float], losers: list[float]) -> list[dict]:
    return [{"winner_logps": w, "loser_logps": x, "skipped": 0} for w, x in zip(winners, losers, strict=True)]


def test_both_log_probs_falling_is_a_warning_that_says_what_to_try() -> None:
    """Thirds of 2: winners -10 to -15, losers -10 to -30."""
    history = steps([-10.0, -10.0, -12.0, -13.0, -15.0, -15.0], [-10.0, -10.0, -20.0, -20.0, -30.0, -30.0])
    warning = falling_logps_warning(history)
    assert warning is not None and "(by 5 and 20)" in warning
    for remedy in ("reference", "dpo_beta", "learning rate", "min_reward_gap"):
        assert remedy in warning


@pytest.mark.parametrize(
    "history",
    [
        steps([-10.0, -9.0, -8.0], [-10.0, -20.0, -30.0]),  # winners rise
        steps([-10.0, -11.0, -12.0], [-10.0, -9.0, -8.0]),  # losers rise
        steps([-10.0, -30.0], [-10.0, -30.0]),  # too few minibatches to tell
        [],
        # winners (-5, -15) to (-6, -16): a fall of 1 within a standard error of 5
        steps([-5.0, -15.0, 0.0, 0.0, -6.0, -16.0], [-10.0, -10.0, 0.0, 0.0, -30.0, -30.0]),
        # NaN of a skipped minibatch is not compared, and what is left is too short
        [
            *steps([-10.0, -20.0], [-10.0, -20.0]),
            {"winner_logps": math.nan, "loser_logps": math.nan, "skipped": 1},
        ],
    ],
)
def test_no_warning_without_cause(history: list[dict]) -> None:
    assert falling_logps_warning(history) is None


# --- bad input


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beta", 0.0),
        ("beta", math.nan),
        ("loss_type", "dpo"),
        ("label_smoothing", 0.5),
        ("train_batch_size", 0),
        ("micro_batch_size", 0),
        ("num_train_epochs", 0),
        ("on_nonfinite", "ignore"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*; allowed is"):
        MADPOUpdateSettings(**{field: value})


def test_what_does_not_belong_together_is_refused() -> None:
    model, pairs = policy(0), make_pairs(2, 1)
    engine = Recorder(model)
    with pytest.raises(DataError, match="one prompt, winner and loser per agent"):
        PairTokens(((1,),), ((1,), (2,)), ((1,),))
    with pytest.raises(DataError, match="pair 0 is of 2 agents"):
        run([model], [engine], make_pairs(1, 2))
    with pytest.raises(DataError, match=r"\(2, 1\)"):
        run([model], [engine], pairs, reference=torch.zeros(3, 1))
    with pytest.raises(DataError, match="permutation"):
        run([model], [engine], pairs, order=lambda epoch: [0, 0])
    with pytest.raises(ConfigError, match="1 models, 2 engines"):
        run([model], [engine, engine], pairs)
