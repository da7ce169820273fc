"""Teams of adapters on one base: who is stepped, what the reference is, what comes back from disk."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from comlrl_core.algorithms import madpo
from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.lora import LoraSettings
from comlrl_core.config.run import RunConfig
from comlrl_core.engine.build import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.team.adapters import AdapterModel
from comlrl_core.team.checkpoint import digest_folder, load_team_folder, save_merged, save_team
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team, load_team
from comlrl_core.team.tiny import load_tiny

LORA = LoraSettings(r=4, targets=["q_proj", "v_proj", "down_proj"])
IDS = torch.tensor([[5, 6, 7, 8, 9]])
SETTINGS = OptimizerSettings(1e-2)


def team_of(count: int = 2, **changes: Any) -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=count, lora=LORA.model_copy(update=changes))


def adapter(team: Team, agent: int) -> AdapterModel:
    return cast(AdapterModel, cast(object, team.models[agent]))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def bits(model: Any) -> list[bytes]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.state_dict().values()]


def train(team: Team, engine: EngineSettings | None = None, updates: int = 2) -> None:
    engines = build_engines(team.models, SETTINGS, engine)
    pairs = [
        madpo.PairTokens(prompts=((5, 6), (7,)), winners=((8, 9), (10, 11)), losers=((12,), (13, 14)))
        for _ in range(updates)
    ]
    settings = madpo.MADPOUpdateSettings(beta=0.3, train_batch_size=1)
    madpo.update(team.models, engines, team.pad_ids, pairs, settings, reference=None, order=lambda _: range(len(pairs)))


def test_a_new_adapter_changes_nothing_and_agents_differ_in_training_alone() -> None:
    team = team_of()
    plain = load_team(agent_model="builtin:tiny", num_agents=1)
    for model in (*team.models, *team.without_adapters().models):
        assert torch.equal(logits(model), logits(plain.models[0]))
    assert adapter(team, 0).base is adapter(team, 1).base
    assert bits(team.models[0]) != bits(team.models[1])


def test_stepping_one_leaves_the_others_and_the_base_as_they_are() -> None:
    """Although the graphs of all agents wait for their backward pass together."""
    team = team_of(3)
    base = logits(team.without_adapters().models[0])
    engines = build_engines(team.models, SETTINGS)
    losses = [model(input_ids=IDS).logits[..., 5].sum() for model in team.models]
    before = [bits(model) for model in team.models]
    for agent, engine in enumerate(engines):
        engine.backward(losses[agent])
        assert engine.step().grad_norm > 0
        after = [bits(model) for model in team.models]
        assert [now != then for now, then in zip(after, before, strict=True)] == [i == agent for i in range(3)]
        before = after
    assert torch.equal(logits(team.without_adapters().models[0]), base)


def test_the_gradient_is_that_of_a_single_adapter() -> None:
    """The margin of one agent moves with its own adapter; two agents on one base train as on a base each."""
    shared, apart = team_of(), team_of(share_base=False)
    assert adapter(apart, 0).base is not adapter(apart, 1).base
    for team in (shared, apart):
        train(team)
    assert [bits(model) for model in shared.models] == [bits(model) for model in apart.models]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_trains_adapters(stage: int) -> None:
    local, sharded = team_of(), team_of()
    train(local, updates=3)
    train(sharded, EngineSettings(kind="deepspeed", zero_stage=stage), updates=3)
    for one, other in zip(local.models, sharded.models, strict=True):
        assert bits(one) != bits(team_of().models[0])
        for name, value in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, atol=1e-5, rtol=0)


def test_adapters_come_back_from_disk(tmp_path: Path) -> None:
    team = team_of()
    train(team)
    save_team(team, tmp_path / "one")
    save_team(team, tmp_path / "two")
    assert digest_folder(tmp_path / "one") == digest_folder(tmp_path / "two")
    assert "safetensors" in str(list((tmp_path / "one" / "agent_1").glob("adapter_model.safetensors")))
    back = load_team_folder(tmp_path / "one", adapters=team.adapters)
    assert back.fingerprint() == team.fingerprint()
    sampled = [
        one.generate([("a", "b")], 2, Sampling(4), lambda t, a, k: 10 * a + k) for one in (team, back, team.copy())
    ]
    assert sampled[0] == sampled[1] == sampled[2]
    with pytest.raises(DataError, match="the base model that they belong to was not named"):
        load_team_folder(tmp_path / "one")


def test_other_tools_read_adapters_and_merged_models(tmp_path: Path) -> None:
    team = team_of()
    train(team)
    own = logits(team.models[1])
    save_team(team, tmp_path / "adapters")
    base = load_team(agent_model="builtin:tiny", num_agents=1).models[0]
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "adapters" / "agent_1")), own)
    save_merged(team, tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "agent_1").eval()
    assert not any("lora" in name for name, _ in whole.named_parameters())
    torch.testing.assert_close(logits(whole), own, atol=1e-5, rtol=0)


def test_a_copy_shares_one_base_and_stays_behind() -> None:
    team = team_of()
    copied = team.copy()
    assert adapter(copied, 0).base is adapter(copied, 1).base is not adapter(team, 0).base
    before = [bits(model) for model in copied.models]
    train(team)
    assert [bits(model) for model in copied.models] == before != [bits(model) for model in team.models]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="one name or folder as the base"):
        load_team(agents=["builtin:tiny", load_tiny(0)[0]], tokenizer=load_tiny(0)[1], lora=LORA)
    with pytest.raises(ConfigError, match="lora: Target modules"):
        team_of(targets=["nothing"])
    with pytest.raises(ValueError, match="zero_stage 0, 1 or 2"):
        RunConfig.model_validate({"team": {"lora": {}}, "engine": {"kind": "deepspeed", "zero_stage": 3}})
    with pytest.raises(ValueError, match="set in the section team"):
        RunConfig.model_validate({"training": {"lora": {"r": 2}}})


def test_settings_reach_the_training_and_come_back_once() -> None:
    config = RunConfig.model_validate({"team": {"lora": {"r": 2}}})
    assert config.training.lora is not None and config.training.lora.r == 2
    assert "lora" not in config.values()["training"]
    assert RunConfig.model_validate(config.values()) == config
