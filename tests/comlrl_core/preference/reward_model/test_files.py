"""A reward model on disk."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.reward_model import (
    FitSettings,
    JointText,
    fit,
    load_reward_model,
    open_reward_model,
    save_reward_model,
)
from comlrl_core.preference.reward_model.files import HEAD_FILE, SETTINGS_FILE
from comlrl_core.team.checkpoint import digest_folder
from comlrl_core.team.team import load_team

TEXTS = [JointText(("a\n", "b\n"), ("the bird", "sings")), JointText(("c\n", "d\n"), ("", "x"))]


def test_comes_back_as_it_was(any_model, tmp_path) -> None:
    any_model.shift.fill_(0.25)
    save_reward_model(any_model, tmp_path / "model")
    found = load_reward_model(tmp_path / "model")
    assert found.score(TEXTS) == any_model.score(TEXTS)
    assert found.fingerprint() == any_model.fingerprint()
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert not found.training


def test_equal_models_give_equal_bytes(records, make_engine, tmp_path) -> None:
    for name in ("first", "second"):
        model = open_reward_model("builtin:tiny", 2)
        fit(model, make_engine(), records[:8], FitSettings(4, eval_fraction=0.0), order=lambda e, n: range(n))
        save_reward_model(model, tmp_path / name)
    save_reward_model(load_reward_model(tmp_path / "first"), tmp_path / "third")
    assert len({digest_folder(tmp_path / name) for name in ("first", "second", "third")}) == 1


def test_is_a_plain_folder(tiny, tmp_path) -> None:
    save_reward_model(tiny, tmp_path / "model")
    backbone = AutoModel.from_pretrained(tmp_path / "model")
    assert type(backbone).__name__ == "Qwen2Model"
    assert torch.equal(backbone.norm.weight, tiny.backbone.norm.weight)


def test_a_saved_one_can_be_fitted_on(tiny, tmp_path, records, make_engine) -> None:
    save_reward_model(tiny, tmp_path / "model")
    found = open_reward_model(str(tmp_path / "model"), 2)
    assert found.score(TEXTS) == tiny.score(TEXTS)  # its head came along
    result = fit(found, make_engine(), records[:4], FitSettings(4, eval_fraction=0.0), order=lambda e, n: range(n))
    assert result.train_pairs == 4
    with pytest.raises(ConfigError, match="of 2 agents, not of 3"):
        open_reward_model(str(tmp_path / "model"), 3)


def test_a_half_precision_backbone_comes_back_as_one(tmp_path) -> None:
    model = open_reward_model("builtin:tiny", 2, model_config={"dtype": "bfloat16"})
    save_reward_model(model, tmp_path / "model")
    found = load_reward_model(tmp_path / "model")
    assert found.backbone.dtype == torch.bfloat16 and found.head.weight.dtype == torch.float32
    save_reward_model(found, tmp_path / "again")
    assert load_reward_model(tmp_path / "again").score(TEXTS) == found.score(TEXTS)


def test_from_an_agents_folder(tmp_path) -> None:
    from comlrl_core.team.checkpoint import save_team

    team = load_team(agent_model="builtin:tiny", num_agents=2)
    save_team(team, tmp_path)
    model = open_reward_model(str(tmp_path / "agent_0"), 2)
    assert torch.equal(model.backbone.norm.weight, team.models[0].base_model.norm.weight)


def test_empty_tensors_are_refused(tiny, tmp_path) -> None:
    tiny.backbone.norm.weight.data = torch.empty(0)
    with pytest.raises(DataError, match=r"'norm\.weight' is an empty tensor"):
        save_reward_model(tiny, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [SETTINGS_FILE, HEAD_FILE, "model.safetensors", "config.json"])
def test_a_missing_or_torn_file_is_named(tiny, tmp_path, name) -> None:
    folder = save_reward_model(tiny, tmp_path / "model")
    file = folder / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match=name):
        load_reward_model(folder)
    file.unlink()
    with pytest.raises(DataError, match=name.partition(".")[0]):
        load_reward_model(folder)


def test_a_head_of_another_model_is_refused(tiny, tmp_path) -> None:
    folder = save_reward_model(tiny, tmp_path / "model")
    save_file({"head.weight": torch.zeros(1, 32), "shift": torch.zeros(())}, folder / HEAD_FILE)
    with pytest.raises(DataError, match=r"head.weight \(1, 32\) does not fit"):
        load_reward_model(folder)
    save_file({"head.weight": torch.zeros(1, 0), "shift": torch.zeros(())}, folder / HEAD_FILE)
    with pytest.raises(DataError, match=r"head.weight \(1, 0\)"):
        load_reward_model(folder)


def test_an_occupied_folder_is_replaced(tiny, tmp_path) -> None:
    save_reward_model(tiny, tmp_path / "model")
    other = open_reward_model("builtin:tiny", 2, head_seed=9)
    save_reward_model(other, tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model" / HEAD_FILE)["head.weight"], other.head.weight.detach())
    shutil.rmtree(tmp_path / "model")
