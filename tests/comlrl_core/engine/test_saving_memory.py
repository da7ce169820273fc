"""Computing activations twice changes no weight; bf16 products change little, and only in training."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from comlrl_core.algorithms import madpo
from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.lora import LoraSettings
from comlrl_core.engine.build import build_engine, build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError
from comlrl_core.team.team import Team, load_team

SETTINGS = OptimizerSettings(1e-3)
LORA = LoraSettings(r=4, targets=["q_proj", "down_proj"])
PAIRS = [
    madpo.PairTokens(prompts=((5, 6), (7,)), winners=((8, 9), (10, 11)), losers=((12,), (13, 14))),
    madpo.PairTokens(prompts=((5,), (7, 4)), winners=((9,), (11,)), losers=((12, 5), (13,))),
]


def trained(lora: LoraSettings | None = None, **engine: Any) -> tuple[Team, list[float]]:
    team = load_team(agent_model="builtin:tiny", num_agents=2, lora=lora)
    engines = build_engines(team.models, SETTINGS, EngineSettings.model_validate(engine))
    settings = madpo.MADPOUpdateSettings(beta=0.3, train_batch_size=2, num_train_epochs=3)
    history = madpo.update(
        team.models, engines, team.pad_ids, PAIRS, settings, reference=None, order=lambda _: range(len(PAIRS))
    )
    return team, [metrics["loss"] for metrics in history]


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_activations_computed_twice_give_the_same_weights(
    lora: LoraSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of adapters on one base too: the second computation sees the adapter of the first."""
    calls = 0
    forward = Qwen2MLP.forward

    def counted(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(self, *args)

    monkeypatch.setattr(Qwen2MLP, "forward", counted)
    plain, _ = trained(lora)
    once = calls
    twice, _ = trained(lora, gradient_checkpointing=True)
    assert calls == 3 * once
    assert twice.fingerprint() == plain.fingerprint()


def test_a_model_without_layers_for_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing: Linear has no layers"):
        build_engine(nn.Linear(2, 2), SETTINGS, EngineSettings(gradient_checkpointing=True))


def test_bf16_products_with_fp32_weights() -> None:
    (plain, losses), (cast, cast_losses) = trained(), trained(precision="bf16_autocast")
    assert cast.fingerprint() != plain.fingerprint()
    assert {parameter.dtype for parameter in cast.models[0].parameters()} == {torch.float32}
    torch.testing.assert_close(torch.tensor(cast_losses), torch.tensor(losses), atol=2e-2, rtol=0)


@pytest.mark.slow
def test_deepspeed_takes_both() -> None:
    options = {"kind": "deepspeed", "zero_stage": 3, "zero_options": {"stage3_param_persistence_threshold": 0}}
    _, losses = trained()
    sharded, sharded_losses = trained(gradient_checkpointing=True, **options)
    torch.testing.assert_close(torch.tensor(sharded_losses), torch.tensor(losses), atol=1e-5, rtol=0)
    assert sharded.copy().fingerprint() == sharded.fingerprint()  # whole again, without DeepSpeed
    _, cast_losses = trained(precision="bf16_autocast", **options)
    torch.testing.assert_close(torch.tensor(cast_losses), torch.tensor(losses), atol=2e-2, rtol=0)
