"""Agents on disk: plain folders, the same bytes each time, complete or absent."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from comlrl_core.errors import DataError
from comlrl_core.randomness import stream_key
from comlrl_core.team.agent import make_agent
from comlrl_core.team.checkpoint import digest_folder, load_team_folder, save_team
from comlrl_core.team.formatters import resolve_formatters
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team, load_team


@pytest.fixture
def mixed(absolute, two_eos):
    agents = [make_agent(0, *absolute, "absolute"), make_agent(1, *two_eos, "two eos")]
    return Team(agents, resolve_formatters(None, 2))


def test_a_saved_agent_is_a_plain_folder_with_equal_weights(tmp_path):
    team = load_team(agent_model="builtin:tiny")
    save_team(team, tmp_path / "it")
    for agent in team.agents:
        folder = tmp_path / "it" / f"agent_{agent.index}"
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.state_dict().keys() == agent.model.state_dict().keys()
        for name, tensor in agent.model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.backend_tokenizer.to_str() == agent.tokenizer.backend_tokenizer.to_str()


def test_the_same_team_gives_the_same_bytes_wherever_it_is_and_came_from(mixed, tmp_path):
    first = save_team(mixed, tmp_path / "first")
    again = save_team(mixed, tmp_path / "deeper" / "again")
    loaded = save_team(load_team_folder(first), tmp_path / "loaded")
    assert digest_folder(first) == digest_folder(again) == digest_folder(loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deeper", "first", "loaded"]


def test_a_loaded_team_answers_as_the_saved_one(mixed, tmp_path):
    loaded = load_team_folder(save_team(mixed, tmp_path / "it"))
    assert loaded.fingerprint() == mixed.fingerprint()
    assert [agent.eos_ids for agent in loaded.agents] == [agent.eos_ids for agent in mixed.agents]
    assert loaded.pad_ids == mixed.pad_ids
    prompts = [("a bird.", "our river"), ("x", "y z")]
    drawn = [team.generate(prompts, 3, Sampling(12), lambda *parts: stream_key(*parts)) for team in (mixed, loaded)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_scores_the_same_bytes_after_saving_and_loading(tmp_path, dtype):
    """In half precision a rounded buffer of rotary positions, which is not saved, came back unrounded."""
    team = load_team(agent_model="builtin:tiny", model_config={"dtype": dtype})
    loaded = load_team_folder(save_team(team, tmp_path / "it"))
    again = save_team(loaded, tmp_path / "again")
    assert digest_folder(tmp_path / "it") == digest_folder(again)
    ids = torch.arange(2, 202).view(2, 100)  # long: positions far from 0 turn most
    with torch.inference_mode():
        for ours, theirs in zip(team.models, loaded.models, strict=True):
            assert {p.dtype for p in theirs.parameters()} == {getattr(torch, dtype)}
            assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_agents_that_share_a_model_share_it_again(tiny, tmp_path):
    model, tokenizer = tiny
    team = load_team(agents=[model, model, "builtin:tiny"], tokenizer=[tokenizer, tokenizer, "builtin:tiny"])
    loaded = load_team_folder(save_team(team, tmp_path / "it"))
    assert loaded.models[0] is loaded.models[1] is not loaded.models[2]
    assert (tmp_path / "it" / "agent_1" / "model.safetensors").is_file()


def test_an_empty_tensor_is_refused_and_nothing_is_left(tmp_path):
    """Pitfall 31: a sharded model saved without gathering its weights is a folder of empty tensors."""
    team = load_team(agent_model="builtin:tiny")
    team.models[1].model.norm.weight.data = torch.empty(0)
    with pytest.raises(DataError, match=r"agent 1: the weight 'model\.norm\.weight' is an empty tensor"):
        save_team(team, tmp_path / "it")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    """Pitfall 28: complete or absent."""
    team = load_team(agent_model="builtin:tiny")
    before = digest_folder(save_team(team, tmp_path / "it"))
    real = PreTrainedModel.save_pretrained
    calls = []

    def second_fails(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", second_fails)
    for name in ("it", "other"):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            save_team(team, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert digest_folder(tmp_path / "it") == before


def test_saving_again_replaces_the_agents_and_keeps_what_else_is_there(tmp_path):
    target = save_team(load_team(agent_model="builtin:tiny", num_agents=3), tmp_path / "it")
    (target / "reward_model").mkdir()
    (target / "reward_model" / "x.json").write_text("{}")
    team = load_team(agent_model="builtin:tiny", seed=9)
    save_team(team, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "agent_0",
        "agent_1",
        "reward_model",
        "team.json",
    ]
    assert load_team_folder(target).fingerprint() == team.fingerprint()


def test_folders_without_a_team_file_load_too(mixed, tmp_path):
    target = save_team(mixed, tmp_path / "it")
    (target / "team.json").unlink()
    assert load_team_folder(target).fingerprint() == mixed.fingerprint()


def test_missing_and_foreign_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="there is no team folder"):
        load_team_folder(tmp_path / "none")
    with pytest.raises(DataError, match="no agents here"):
        load_team_folder(tmp_path)
    (tmp_path / "team.json").write_text("{")
    with pytest.raises(DataError, match=r"team\.json: not a team file"):
        load_team_folder(tmp_path)
    (tmp_path / "team.json").write_text(json.dumps({"model_of_agent": [1, 1]}))
    with pytest.raises(DataError, match="model_of_agent"):
        load_team_folder(tmp_path)
    (tmp_path / "team.json").write_text(json.dumps({"model_of_agent": [0]}))
    with pytest.raises(DataError, match=r"agent_0: no model of agent 0"):
        load_team_folder(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        digest_folder(tmp_path / "none")


def test_the_digest_sees_names_and_contents_and_nothing_else(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "one").write_text("1")
        (tmp_path / name / "two").write_text("2")
    assert digest_folder(tmp_path / "a") == digest_folder(tmp_path / "b")
    (tmp_path / "b" / "two").rename(tmp_path / "b" / "three")
    assert digest_folder(tmp_path / "a") != digest_folder(tmp_path / "b")
