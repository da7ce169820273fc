"""With one agent the family is that of TRL: gradients equal those of its RLOOTrainer and GRPOTrainer.

Both sides see the same sampled ids and rewards; the divergence and (but for `grpo`) the scaling are off. TRL's
fused head takes log-probabilities in fp32 whatever the dtype of the weights: as it is, the gradients agree to 1e-5 of
the largest; with its log-probabilities in fp64 (a plain log-softmax in their place), to 1e-9.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from comlrl_core.algorithms.reinforce import train_minibatch
from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.rl.advantages import AdvantageMode, group_advantages
from comlrl_core.rollout.buffer import NodeSample

pytestmark = pytest.mark.slow  # importing TRL and building its trainers takes over five seconds

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]
PAD, EOS = 0, 1
TASKS = [
    {"prompt": "a b c"},
    {"prompt": "p n o"},
]  # alike in length: TRL gives padded prompts no positions of their own
TEMPERATURE = 0.8
LENGTH = 6


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def policy() -> PreTrainedModel:
    """GPT-2 in fp64: its layer norms stay in fp64. EOS is likely enough to end some completions early."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Recorder(LocalEngine):
    """Keeps the gradient that a step would have used."""

    def step(self) -> Any:
        self.gradient = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return super().step()


def logprobs_in_fp64(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, None]:
    """In the place of TRL's own: log-probabilities of the last tokens, without an entropy."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    chosen = input_ids[:, -logits_to_keep:].unsqueeze(-1)
    found = (logits / TEMPERATURE).log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)
    return found, torch.zeros_like(found), None


def of_trl(
    name: str, rewards: list[list[float]], folder: Path, fp64: bool, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """A trainer of TRL, and what it sampled and scored for both tasks: the rewards are those given."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    flat = [reward for group in rewards for reward in group]
    trainer = getattr(trl, f"{name}Trainer")(
        policy(),
        reward_funcs=lambda completions, **_: flat,
        args=getattr(trl, f"{name}Config")(
            output_dir=str(folder),
            per_device_train_batch_size=len(flat),
            num_generations=len(rewards[0]),
            max_completion_length=LENGTH,
            temperature=TEMPERATURE,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to="none",
            gradient_checkpointing=False,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_list(TASKS),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()
    if fp64:
        trainer._get_per_token_logps_and_entropies = logprobs_in_fp64
    return trainer, trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def gradient_of_trl(trainer: Any, sampled: dict[str, Any]) -> list[Tensor]:
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, sampled).backward()
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def rows(sampled: dict[str, Any], what: str) -> list[tuple[int, ...]]:
    pairs = zip(sampled[f"{what}_ids"].tolist(), sampled[f"{what}_mask"].tolist(), strict=True)
    return [tuple(token for token, real in zip(ids, mask, strict=True) if real) for ids, mask in pairs]


def ours(
    sampled: dict[str, Any], rewards: list[list[float]], mode: AdvantageMode, normalize: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Our gradient on the same ids and rewards, from a policy of the same weights; and our advantages."""
    returns = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(returns, torch.ones_like(returns, dtype=torch.bool), mode, normalize)
    size = returns.shape[1]
    prompts, completions = rows(sampled, "prompt"), rows(sampled, "completion")
    samples = [
        NodeSample(
            turn=1,
            version=0,
            prompts=(prompts[start],),
            completions=(tuple(completions[start : start + size]),),
            advantages=(tuple(advantages[start // size].tolist()),),
            zero_std=(False,),
        )
        for start in range(0, len(prompts), size)
    ]
    model = policy()
    engine = Recorder(model, OptimizerSettings(1e-3))
    train_minibatch([model], [engine], [PAD], samples, TEMPERATURE)
    return engine.gradient, advantages


def assert_equal(found: list[Tensor], expected: list[Tensor], fp64: bool) -> None:
    scale = max(gradient.abs().max().item() for gradient in expected)
    assert scale > 1e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 if fp64 else 1e-5 * scale)


@pytest.mark.parametrize("fp64", [True, False])
def test_one_agent_equals_rloo_of_trl(tmp_path: Path, fp64: bool) -> None:
    """Rewards are binary fractions and K - 1 = 4, so that TRL's fp32 advantages are exact."""
    rewards = [[0.5, 1.0, 0.25, 2.0, 0.0], [1.5, 0.0, 0.5, 0.25, 0.75]]
    trainer, sampled = of_trl("RLOO", rewards, tmp_path, fp64)
    found, _ = ours(sampled, rewards, "rloo")
    assert len({len(ids) for ids in rows(sampled, "completion")}) > 1
    assert_equal(found, gradient_of_trl(trainer, sampled), fp64)


@pytest.mark.parametrize("fp64", [True, False])
def test_one_agent_equals_dr_grpo_of_trl_up_to_its_constant(tmp_path: Path, fp64: bool) -> None:
    """Dr. GRPO (arXiv 2503.20783) divides each sequence's sum by the longest length allowed, a constant."""
    rewards = [[0.5, 1.0, 0.25, 2.0], [1.5, 0.0, 0.5, 0.25]]
    trainer, sampled = of_trl("GRPO", rewards, tmp_path, fp64, loss_type="dr_grpo", scale_rewards="none")
    found, _ = ours(sampled, rewards, "mean")
    assert_equal(found, [LENGTH * gradient for gradient in gradient_of_trl(trainer, sampled)], fp64)


@pytest.mark.parametrize("fp64", [True, False])
def test_one_agent_equals_grpo_of_trl_with_its_own_deviation_and_sums(tmp_path: Path, fp64: bool) -> None:
    """GRPO divides each sequence by its own length, and by the unbiased deviation plus 1e-4.

    Its loss of one sequence alone is a mean over that sequence; times the length, over all sequences, it is the loss
    of sums. Our population deviation becomes its unbiased one on this side. TRL holds its advantages in fp32: they are
    replaced by the same ones in fp64 after both were compared.
    """
    rewards = [[0.5, 1.0, 0.25, 2.0], [1.5, 0.0, 0.5, 0.25]]
    trainer, sampled = of_trl("GRPO", rewards, tmp_path, fp64, loss_type="grpo", scale_rewards="group")
    _, advantages = ours(sampled, rewards, "mean", normalize=True)
    returns = torch.tensor(rewards, dtype=torch.float64)
    scale = returns.std(dim=1, correction=0) / (returns.std(dim=1, correction=1) + 1e-4)
    scaled = advantages * scale.unsqueeze(1)
    torch.testing.assert_close(sampled["advantages"].double(), scaled.flatten(), rtol=0, atol=1e-6)

    expected: list[Tensor] = []
    for index, completion in enumerate(rows(sampled, "completion")):
        alone = {
            key: value[index : index + 1] if torch.is_tensor(value) and value.dim() else copy.copy(value)
            for key, value in sampled.items()
        }
        alone["advantages"] = scaled.flatten()[index : index + 1]
        sums = [gradient * len(completion) / returns.numel() for gradient in gradient_of_trl(trainer, alone)]
        expected = [a + b for a, b in zip(expected, sums, strict=True)] if expected else sums

    # Our gradient is linear in each node's advantages: the deviation of a node is a factor of its part.
    parts = [ours(_only(sampled, node), [rewards[node]], "mean", normalize=True)[0] for node in range(2)]
    found = [
        sum(part[index] * scale[node].item() for node, part in enumerate(parts)) / 2 for index in range(len(expected))
    ]
    assert_equal(found, expected, fp64)


def _only(sampled: dict[str, Any], node: int) -> dict[str, Any]:
    """The rows of one of two nodes."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    size = len(sampled["prompt_ids"]) // 2
    return {name: sampled[name][node * size : (node + 1) * size] for name in names}
