"""Models and tokenizers from every kind of source, and what is said when there is none."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from comlrl_core.errors import ConfigError
from comlrl_core.team.loading import load_model_and_tokenizer
from comlrl_core.team.tiny import load_tiny


@pytest.fixture
def folder(tiny, tmp_path):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_loads_equal_weights_and_the_same_tokenizer(folder, tiny):
    model, tokenizer = load_model_and_tokenizer(str(folder))
    for name, tensor in tiny[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert tokenizer.backend_tokenizer.to_str() == tiny[1].backend_tokenizer.to_str()
    assert not model.training


def test_loaded_parameters_lie_in_fresh_aligned_memory_and_stay_tied(folder):
    model, _ = load_model_and_tokenizer(str(folder))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.lm_head.weight.clone()
    (folder / "model.safetensors").write_bytes(b"\0" * 16)
    assert torch.equal(model.lm_head.weight, before)


def test_a_generic_tokenizer_comes_back_as_it_was_saved(chat, tmp_path):
    """For some model types `AutoTokenizer` swaps a generic tokenizer for their usual class: other ids for the
    same text."""
    from transformers import AutoTokenizer

    model, _ = load_tiny(0)
    _, tokenizer = chat
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model_and_tokenizer(str(tmp_path))[1]
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.chat_template == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("missing", ["/no/such/folder", "./no_such_folder", "a/b/c"])
def test_a_missing_folder_is_named_with_what_is_allowed(missing):
    with pytest.raises(ConfigError, match=rf"{missing}.*builtin:tiny.*folder.*hub"):
        load_model_and_tokenizer(missing)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model_and_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model_and_tokenizer(str(tmp_path))


def test_a_name_that_the_hub_does_not_give_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("nobody/nothing is not a valid model identifier\nmore text")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot load the model 'nobody/nothing': .*identifier\. Allowed: 'builtin:tiny'"
    ):
        load_model_and_tokenizer("nobody/nothing")


def test_an_unknown_builtin_is_named():
    with pytest.raises(ConfigError, match=r"'builtin:small'.*allowed: 'builtin:tiny'"):
        load_model_and_tokenizer("builtin:small")
    with pytest.raises(ConfigError, match="revision"):
        load_model_and_tokenizer("builtin:tiny", model_config={"revision": "x"})


@pytest.mark.parametrize("source", ["builtin:tiny", "folder"])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_and_attention_are_passed_on(folder, source, name):
    source = str(folder) if source == "folder" else source
    options = {
        name: "bfloat16",
        "model_kwargs": {"attn_implementation": "eager"},
        "critic_model_kwargs": {"x": 1},
    }
    model, _ = load_model_and_tokenizer(source, model_config=options)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", ["bf16", "int8", 16])
def test_an_unknown_dtype_is_refused_with_the_allowed_ones(dtype):
    with pytest.raises(ConfigError, match="bfloat16"):
        load_model_and_tokenizer("builtin:tiny", model_config={"dtype": dtype})


def test_contradicting_settings_are_refused():
    with pytest.raises(ConfigError, match="torch_dtype"):
        load_model_and_tokenizer("builtin:tiny", model_config={"dtype": "float32", "torch_dtype": "float16"})
    with pytest.raises(ConfigError, match="attn_implementation"):
        load_model_and_tokenizer(
            "builtin:tiny",
            model_config={"attn_implementation": "sdpa", "model_kwargs": {"attn_implementation": "eager"}},
        )


@pytest.mark.parametrize("tokens", [["<a>", "<b>"], {"additional_special_tokens": ["<a>", "<b>"]}])
def test_special_tokens_grow_the_embeddings_the_same_way_each_time(tokens):
    model, tokenizer = load_model_and_tokenizer("builtin:tiny", model_config={"special_tokens": tokens}, seed=5)
    assert tokenizer("x<a><b>")["input_ids"][1:] == [320, 321]
    assert model.get_input_embeddings().weight.shape[0] == 322
    again, _ = load_model_and_tokenizer("builtin:tiny", model_config={"special_tokens": tokens}, seed=5)
    assert torch.equal(model.get_input_embeddings().weight, again.get_input_embeddings().weight)
    assert torch.equal(model.get_input_embeddings().weight[:320], load_tiny(5)[0].get_input_embeddings().weight)
    with pytest.raises(ConfigError, match="no_such_token"):
        load_model_and_tokenizer("builtin:tiny", model_config={"special_tokens": {"no_such_token": "<a>"}})


def test_a_loaded_model_keeps_its_identity_and_needs_its_tokenizer(tiny):
    model, tokenizer = tiny
    model.train()
    loaded, own = load_model_and_tokenizer(model, tokenizer)
    assert loaded is model
    assert own is tokenizer
    assert not model.training
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        load_model_and_tokenizer(model)
    with pytest.raises(ConfigError, match="dtype"):
        load_model_and_tokenizer(model, tokenizer, {"dtype": "float32"})
