"""Loss and gradient equal those of TRL's RewardTrainer on the same ids, in fp64 to 1e-9."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.preference.reward_model import FitSettings, JointRewardModel, fit
from comlrl_core.team.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow  # importing TRL and building its trainer takes over five seconds

TEXTS = [("sings.", "a song", "x", "y"), ("", "the old boat keeps", "lamp", ""), ("a", "b", "a fox", "b")]


class Recorder(LocalEngine):
    """Keeps the loss's gradient that a step would have used."""

    def step(self) -> Any:
        self.gradient = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return super().step()


def classifier(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": 320, "num_labels": 1, "initializer_range": 0.3, "pad_token_id": 0}
    if kind == "gpt2":
        config = GPT2Config(n_positions=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=1, **shared)
        return GPT2ForSequenceClassification(config).double().eval()
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **shared,
    )
    return Qwen2ForSequenceClassification(config).double().eval()


def trl_loss_and_gradient(
    model: PreTrainedModel, rows: list[dict[str, list[int]]], center: float, folder: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    trainer = trl.RewardTrainer(
        model,
        args=trl.RewardConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(rows),
            center_rewards_coefficient=center or None,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    batch = trainer.data_collator(rows)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("center", [0.0, 0.05])
def test_equals_the_reward_trainer_of_trl(kind: str, center: float, pair, tmp_path: Path) -> None:
    theirs = classifier(kind)
    backbone = copy.deepcopy(theirs.base_model)
    model = JointRewardModel(backbone, tiny_tokenizer(), 2).double()
    with torch.no_grad():
        model.head.weight.copy_(theirs.score.weight)
    records = [pair(f"task {n}", (a, b), (c, d)) for n, (a, b, c, d) in enumerate(TEXTS)]
    encoded = model.encoder.encode_pairs(records).pairs
    rows = [{"chosen_ids": list(p.winner), "rejected_ids": list(p.loser)} for p in encoded]

    expected_loss, expected = trl_loss_and_gradient(theirs, rows, center, tmp_path)
    engine = Recorder(model, OptimizerSettings(1e-3))
    settings = FitSettings(len(records), center_rewards_coef=center, eval_fraction=0.0)
    result = fit(model, lambda _: engine, records, settings, order=lambda epoch, count: range(count))

    assert result.history[0]["loss"] == pytest.approx(expected_loss, rel=1e-9)
    prefix = f"{theirs.base_model_prefix}."
    named = {f"backbone.{name.removeprefix(prefix)}": gradient for name, gradient in expected.items()}
    named["head.weight"] = named.pop("backbone.score.weight")
    assert named.keys() == engine.gradient.keys()
    scale = max(g.abs().max().item() for g in named.values())
    assert scale > 1e-2
    for name, wanted in named.items():
        torch.testing.assert_close(engine.gradient[name], wanted, rtol=0, atol=1e-9 * scale)
