"""Log-probabilities of chosen tokens: by hand, by PyTorch's log-softmax, and their gradient."""

import math

import pytest
import torch

from comlrl_core.rl import logprobs
from comlrl_core.rl.logprobs import chosen_logprobs, mean_logprobs, sequence_logprobs


def test_by_hand() -> None:
    """Logits (ln 1, ln 3): softmax = (1/4, 3/4). At temperature 1/2 they double: (1, 9) / 10."""
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    first, second = torch.tensor([[0]]), torch.tensor([[1]])
    assert chosen_logprobs(logits, first).item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert chosen_logprobs(logits, second).item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert chosen_logprobs(logits, second, temperature=0.5).item() == pytest.approx(math.log(0.9), abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 22, 1 << 22])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_equals_log_softmax_with_its_gradient(chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(11, (2, 3), generator=generator)
    weights = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    expected = (logits / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = chosen_logprobs(logits, ids, temperature)
    (found_grad,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_grad, expected_grad, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: chosen_logprobs(x, ids, temperature), (logits,))


def test_accumulated_in_fp32_whatever_the_dtype() -> None:
    """bf16 holds 8 bits: a normaliser of about 10 kept in bf16 would be off by up to 0.03."""
    logits = torch.randn(4, 5, 1000, generator=torch.Generator().manual_seed(1)).mul(3).bfloat16()
    ids = torch.zeros(4, 5, dtype=torch.long)
    found = chosen_logprobs(logits, ids)
    expected = logits.double().log_softmax(-1)[..., 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert chosen_logprobs(logits.double(), ids).dtype == torch.float64


def test_large_logits_do_not_overflow() -> None:
    """(1e4, 0): the first has probability 1, the second log-probability -1e4."""
    logits = torch.tensor([[[1e4, 0.0], [1e4, 0.0]]], requires_grad=True)
    found = chosen_logprobs(logits, torch.tensor([[0, 1]]))
    assert found.tolist() == [[0.0, -1e4]]
    found.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_sum_and_mean_count_the_mask_alone() -> None:
    """Sums: -1 - 2 = -3, -4, nothing = 0. Means: -1.5, -4 and, not 0/0, 0."""
    values = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, math.inf, -9.0], [-5.0, -6.0, -7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert sequence_logprobs(values, mask).tolist() == [-3.0, -4.0, 0.0]
    assert mean_logprobs(values, mask).tolist() == [-1.5, -4.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        chosen_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)


def test_shapes_must_belong_together() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        chosen_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.long))
