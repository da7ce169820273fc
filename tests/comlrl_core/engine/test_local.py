"""The local engine: AdamW as PyTorch's, fp32 masters, state that comes back bit for bit."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from comlrl_core.engine.local import STATE_FILE, LocalEngine, build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError, DataError

SETTINGS = OptimizerSettings(1e-2, weight_decay=0.1, lr_schedule="cosine", lr_warmup_steps=2)


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def train(engine: LocalEngine, steps: range) -> None:
    for step in steps:
        engine.backward(loss_of(engine.model, step))
        engine.step()


def bits(model: nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def test_equals_adamw_of_pytorch() -> None:
    """Same clip, same schedule, same update as a loop written out."""
    found, expected = network(), network()
    engine = LocalEngine(found, OptimizerSettings(1e-2, 0.1, 0.8, 0.95, 1e-7, gradient_clip=0.05))
    optimizer = torch.optim.AdamW(expected.parameters(), 1e-2, (0.8, 0.95), 1e-7, 0.1)
    for step in range(4):
        engine.backward(loss_of(found, step))
        result = engine.step()
        loss_of(expected, step).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert result == (norm.item(), 1e-2, False)
    assert bits(found) == bits(expected)


def test_gradients_accumulate_over_backward_calls() -> None:
    """A step after two backward calls is the step on the sum."""
    twice, once = network(), network()
    plain = OptimizerSettings(1e-2)
    one, other = LocalEngine(twice, plain), LocalEngine(once, plain)
    one.backward(loss_of(twice, 0))
    one.backward(loss_of(twice, 1))
    other.backward(loss_of(once, 0) + loss_of(once, 1))
    assert one.step().grad_norm == pytest.approx(other.step().grad_norm, rel=1e-6)
    for found, expected in zip(twice.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_bf16_weights_move_although_the_learning_rate_is_below_their_resolution() -> None:
    """1e-4 steps at weight 1.0, where bf16 has a spacing of 2^-7 above and 2^-8 below: 100 steps make 0.01.

    Without masters each step rounds back to 1.0 and nothing ever moves.
    """
    model = nn.Linear(8, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    engine = LocalEngine(model, OptimizerSettings(1e-4))
    for _ in range(100):
        engine.backward(model(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
        engine.step()
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight < 1.0).all()
    torch.testing.assert_close(model.weight.float(), torch.full((1, 8), 0.99), rtol=0, atol=2**-8)

    naive = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([naive], 1e-4, weight_decay=0.0)
    for _ in range(100):
        naive.grad = torch.ones_like(naive)
        optimizer.step()
    assert (naive == 1.0).all()


def test_small_gradients_of_many_micro_batches_are_not_lost_in_bf16() -> None:
    """1 + 512 * 2^-9 = 2; summed in bf16 every addend of 2^-9 would be rounded away and the sum stay 1."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    engine = LocalEngine(model, OptimizerSettings(1e-3, gradient_clip=None))
    for value in [1.0] + [2.0**-9] * 512:
        engine.backward(model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum())
    assert engine.step().grad_norm == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interrupted_equals_uninterrupted(dtype: torch.dtype, tmp_path: Path) -> None:
    """Three steps, saved, loaded into new objects, three more: the bytes of six steps in one go."""
    whole = LocalEngine(network(dtype), SETTINGS)
    whole.begin(6)
    train(whole, range(6))

    first = LocalEngine(network(dtype), SETTINGS)
    first.begin(6)
    train(first, range(3))
    first.save_state(tmp_path)
    model = network(dtype, seed=99)
    model.load_state_dict(first.model.state_dict())
    second = LocalEngine(model, SETTINGS)
    second.load_state(tmp_path)
    train(second, range(3, 6))
    assert bits(model) == bits(whole.model)

    second.save_state(tmp_path / "second")
    whole.save_state(tmp_path / "whole")
    assert (tmp_path / "second" / STATE_FILE).read_bytes() == (tmp_path / "whole" / STATE_FILE).read_bytes()


def test_saving_leaves_one_file_and_repeats_its_bytes(tmp_path: Path) -> None:
    engine = LocalEngine(network(torch.bfloat16), SETTINGS)
    engine.begin(9)
    train(engine, range(2))
    engine.save_state(tmp_path)
    first = (tmp_path / STATE_FILE).read_bytes()
    engine.save_state(tmp_path)
    assert (tmp_path / STATE_FILE).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def test_begin_restarts_the_schedule_and_keeps_the_moments(tmp_path: Path) -> None:
    settings = OptimizerSettings(1e-2, lr_schedule="linear")
    engine = LocalEngine(network(), settings)
    engine.begin(2)
    rates = []
    for step in range(4):
        if step == 2:
            engine.begin(2)
        engine.backward(loss_of(engine.model, step))
        rates.append(engine.step().learning_rate)
    assert rates == [1e-2, 5e-3, 1e-2, 5e-3]
    engine.save_state(tmp_path)
    from safetensors.torch import load_file

    steps = {name: value for name, value in load_file(tmp_path / STATE_FILE).items() if name.startswith("step/")}
    assert {value.item() for value in steps.values()} == {4.0}  # Adam's own count goes on


def test_a_decaying_schedule_needs_its_length() -> None:
    engine = LocalEngine(network(), SETTINGS)
    engine.backward(loss_of(engine.model, 0))
    with pytest.raises(ConfigError, match="begin"):
        engine.step()


def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten() -> None:
    model = network()
    engine = LocalEngine(model, OptimizerSettings(1e-2))
    before = bits(model)
    engine.backward(loss_of(model, 0) * float("nan"))
    assert engine.step().skipped
    assert bits(model) == before
    engine.backward(loss_of(model, 0))
    result = engine.step()
    assert not result.skipped and result.grad_norm < float("inf")
    assert bits(model) != before


def test_stepping_one_agent_leaves_the_other_bit_identical() -> None:
    models = [network(), network(seed=1)]
    engines = build_engines(models, OptimizerSettings(1e-2))
    before = [bits(model) for model in models]
    engines[0].backward(loss_of(models[0], 0))
    engines[0].step()
    assert bits(models[0]) != before[0]
    assert bits(models[1]) == before[1]
    engines[1].step()  # without a gradient of its own there is nothing to apply
    assert bits(models[1]) == before[1]


def test_a_shared_model_given_twice_has_one_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    shared, own = network(), network(seed=1)
    with caplog.at_level(logging.INFO):
        engines = build_engines([shared, own, shared], OptimizerSettings(1e-2))
    assert engines[0] is engines[2] and engines[0] is not engines[1]
    assert [r.getMessage() for r in caplog.records] == ["agents that share one model, and one optimizer: 0, 2"]


def test_two_models_with_one_trainable_parameter_are_refused() -> None:
    """Two optimizers would step it; frozen parameters may be shared (adapters on one base)."""
    one, other = network(), network(seed=1)
    other[0] = one[0]
    with pytest.raises(ConfigError, match=r"agents 0 and 1 .* 0\.weight"):
        build_engines([one, other], OptimizerSettings(1e-2))
    one[0].requires_grad_(False)
    assert len(build_engines([one, other], OptimizerSettings(1e-2))) == 2


def test_frozen_parameters_stay_and_a_frozen_model_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = bits(model)
    train(LocalEngine(model, OptimizerSettings(1e-2)), range(1))
    assert bits(model)[:2] == before[:2] and bits(model)[2:] != before[2:]
    with pytest.raises(ConfigError, match="trainable"):
        LocalEngine(model.requires_grad_(False), OptimizerSettings(1e-2))


def test_foreign_or_torn_state_is_refused(tmp_path: Path) -> None:
    engine = LocalEngine(network(torch.bfloat16), OptimizerSettings(1e-2))
    with pytest.raises(DataError, match="no saved engine state"):
        engine.load_state(tmp_path)
    train(engine, range(2))
    engine.save_state(tmp_path)
    with pytest.raises(DataError, match="belongs to other weights"):
        LocalEngine(network(torch.bfloat16, seed=5), OptimizerSettings(1e-2)).load_state(tmp_path)
    with pytest.raises(DataError, match="dtype"):
        LocalEngine(network(), OptimizerSettings(1e-2)).load_state(tmp_path)
    with pytest.raises(DataError, match="fits no trainable parameter"):
        LocalEngine(nn.Linear(2, 2), OptimizerSettings(1e-2)).load_state(tmp_path)
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="not a readable engine state"):
        engine.load_state(tmp_path)
