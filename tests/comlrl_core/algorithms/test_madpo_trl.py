"""With one agent MADPO is DPO: loss and gradient equal those of TRL's DPOTrainer on the same batch.

To 1e-5 relative: TRL computes its log-probabilities in fp32 whatever the dtype of the weights. That the loss
is the same function of the margin is tested to 1e-9 in rl/test_preference.py.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from comlrl_core.algorithms.madpo import MADPOUpdateSettings, PairTokens, reference_margins, update
from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.protocol import OptimizerSettings

pytestmark = pytest.mark.slow  # importing TRL and building its trainer takes over five seconds

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]
PAD, EOS = 0, 1
ROWS = [
    {"prompt": "a b c", "chosen": " d", "rejected": " e f g h"},
    {"prompt": "p", "chosen": " o n m l k", "rejected": " j i"},
    {"prompt": "h g f e d", "chosen": " a a b", "rejected": " c"},
]


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def policy(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
        ).double()
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    ).double()


def trl_loss_and_gradient(
    model: PreTrainedModel, reference: PreTrainedModel | None, loss_type: str, beta: float, folder: Path
) -> tuple[float, list[Tensor]]:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    trainer = trl.DPOTrainer(
        model,
        reference or copy.deepcopy(model),
        args=trl.DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(ROWS),
            beta=beta,
            loss_type=[loss_type],
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    if reference is None:
        trainer.precompute_ref_logps = True
        batch["ref_chosen_logps"] = batch["ref_rejected_logps"] = torch.zeros(len(ROWS), dtype=torch.float64)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pairs() -> list[PairTokens]:
    encode = tokenizer().encode
    return [
        PairTokens(
            (tuple(encode(row["prompt"])),),
            ((*encode(row["chosen"]), EOS),),
            ((*encode(row["rejected"]), EOS),),
        )
        for row in ROWS
    ]


class Recorder(LocalEngine):
    """Keeps the gradient that a step would have used."""

    def step(self) -> Any:
        self.gradient = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return super().step()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("with_reference", [True, False])
def test_one_agent_equals_dpo_of_trl(kind: str, loss_type: Any, with_reference: bool, tmp_path: Path) -> None:
    beta = 0.3
    model = policy(kind, 0)
    reference = policy(kind, 1) if with_reference else None
    expected_loss, expected = trl_loss_and_gradient(copy.deepcopy(model), reference, loss_type, beta, tmp_path)

    settings = MADPOUpdateSettings(beta=beta, loss_type=loss_type, train_batch_size=len(ROWS))
    margins = None
    if reference is not None:
        margins = reference_margins([reference], pairs(), [PAD], 2, settings.normalised)
    engine = Recorder(model, OptimizerSettings(1e-3))
    history = update([model], [engine], [PAD], pairs(), settings, reference=margins, order=lambda _: range(len(ROWS)))

    assert history[0]["loss"] == pytest.approx(expected_loss, rel=1e-5)
    scale = max(g.abs().max().item() for g in expected)
    assert scale > 1e-2
    for found, wanted in zip(engine.gradient, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * scale)
