"""A sequence scores the same alone and in any batch; every completion token counts, and nothing else does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comlrl_core.errors import DataError
from comlrl_core.team.scoring import score_completions, scoring_mode

VOCABULARY = 23
PAD = 0
EOS = 2
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [5, EOS, PAD, 6], [12, 13]]
COMPLETIONS = [[14, EOS], [15, 16, 17, 18, 19, 20, EOS], [21], []]


def gpt2(dropout: float = 0.0) -> PreTrainedModel:
    """Absolute positions."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.5,
    )
    return GPT2LMHeadModel(config)


def qwen2() -> PreTrainedModel:
    """Rotary positions, grouped queries."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return Qwen2ForCausalLM(config)


def by_hand(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """No batch, no mask, no positions: the log-softmax at the position before each completion token."""
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return torch.stack([logprobs[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("make", [gpt2, qwen2])
def test_alone_equals_batched(make: Callable[[], PreTrainedModel], padding_side: Any) -> None:
    model = make()
    with scoring_mode(model), torch.no_grad():
        scores, mask = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD, padding_side=padding_side)
        assert mask.sum(dim=1).tolist() == [2, 7, 1, 0]
        assert not scores[~mask].any()
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            alone, _ = score_completions(model, [prompt], [completion], pad_id=PAD, padding_side=padding_side)
            torch.testing.assert_close(scores[row, : len(completion)], alone[0, : len(completion)], rtol=0, atol=1e-5)
            if completion:
                expected = by_hand(model, prompt, completion)
                torch.testing.assert_close(alone[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_without_positions_a_left_padded_absolute_model_would_differ(
    padding_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: with positions counted from the edge of the batch, left padding moves them."""
    model = gpt2()
    plain_forward = model.forward

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:  # takes no position_ids
        return plain_forward(input_ids=input_ids, attention_mask=attention_mask)

    right, mask = score_completions(model.eval(), PROMPTS, COMPLETIONS, pad_id=PAD)
    monkeypatch.setattr(model, "forward", forward)
    found, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD, padding_side=padding_side)
    gap = (found - right)[mask].abs().max().item()
    assert gap < 1e-5 if padding_side == "right" else gap > 1e-2


def test_the_pad_id_does_not_matter_even_if_it_is_the_eos() -> None:
    model = qwen2().eval()
    expected, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    found, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=EOS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_pads_after_eos_stay_out() -> None:
    """A completion with a pad appended differs by exactly that token's score; the shorter is unchanged."""
    model = qwen2().eval()
    scores, mask = score_completions(model, [[5, 6]] * 2, [[7, EOS], [7, EOS, PAD]], pad_id=PAD)
    torch.testing.assert_close(scores[0, :2], scores[1, :2], rtol=0, atol=1e-6)
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert scores[0, 2].item() == 0.0 and scores[1, 2].item() < 0.0


def test_a_one_token_completion_is_scored_and_has_a_gradient() -> None:
    """The last token of a completion, here its only one, is scored too."""
    model = qwen2().eval()
    scores, _ = score_completions(model, [[5, 6], [5, 6]], [[EOS], [7, EOS]], pad_id=PAD)
    torch.testing.assert_close(scores[0, 0], by_hand(model, [5, 6], [EOS])[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[1, 1], by_hand(model, [5, 6], [7, EOS])[1], rtol=0, atol=1e-5)
    scores[0, 0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.lm_head.parameters())


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_only_empty_completions_give_zeros_with_a_graph(padding_side: Any) -> None:
    model = gpt2().eval()
    scores, mask = score_completions(model, [[5], [6, 7]], [[], []], pad_id=PAD, padding_side=padding_side)
    assert not mask.any() and not scores.any()
    scores.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_temperature_divides_the_logits() -> None:
    model = gpt2().eval()
    scores, mask = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD, temperature=0.5)
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)  # untied copy: doubles the logits alone
    expected, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    torch.testing.assert_close(scores[mask], expected[mask], rtol=0, atol=1e-5)


def test_scores_are_fp32_under_bf16_weights() -> None:
    scores, _ = score_completions(qwen2().eval().bfloat16(), PROMPTS, COMPLETIONS, pad_id=PAD)
    assert scores.dtype == torch.float32


def test_dropout_is_off_while_scoring_and_back_on_afterwards() -> None:
    """With 40% dropout two passes in training mode differ; in `scoring_mode` they are the same bits."""
    model = gpt2(dropout=0.4)
    model.get_submodule("transformer.h.0").eval()  # a module that was off stays off
    before = [module.training for module in model.modules()]
    with pytest.raises(KeyError), scoring_mode(model):
        first, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
        second, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
        assert torch.equal(first, second) and first.requires_grad
        raise KeyError
    assert [module.training for module in model.modules()] == before
    third, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    assert (third - first).abs().max().item() > 1e-2


def test_wrapped_models_get_their_positions_too() -> None:
    """DDP and DeepSpeed hide the signature behind `*args, **kwargs`; under left padding positions show."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    model = gpt2().eval()
    expected, _ = score_completions(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    found, _ = score_completions(Wrapper(model), PROMPTS, COMPLETIONS, pad_id=PAD, padding_side="left")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1], []], [[2], [3]], "prompt 1 of the batch is empty"),
        ([[1]], [], "1 prompts for 0"),
        ([], [], "0 prompts"),
    ],
)
def test_bad_input_is_refused(prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_completions(gpt2(), prompts, completions, pad_id=PAD)


def test_unknown_padding_side_is_refused() -> None:
    with pytest.raises(ValueError, match="right, left"):
        score_completions(gpt2(), [[1]], [[2]], pad_id=PAD, padding_side="middle")  # type: ignore[arg-type]
