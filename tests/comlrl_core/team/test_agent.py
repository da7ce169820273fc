"""From text to ids and back: one BOS, one EOS, no id lost."""

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from comlrl_core.team.agent import context_length, eos_ids, make_agent
from comlrl_core.team.formatters import render

BOS, EOS, PAD = 320, 1, 0


def test_a_plain_prompt_gets_the_bos_its_tokenizer_adds(chat_agent):
    ids = chat_agent.encode_prompt("a bird.")
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert EOS not in ids


def test_two_bos_when_a_chat_template_already_added_one(chat_agent):
    """Pitfall 8: the template writes a BOS and the tokenizer adds one: exactly one must remain."""
    text = render(chat_agent.tokenizer, [{"role": "user", "content": "a bird."}])
    assert text.startswith("<bos>")
    assert text.endswith("[assistant] ")
    assert chat_agent.encode_prompt(text).count(BOS) == 1
    assert chat_agent.tokenizer(text)["input_ids"].count(BOS) == 2, "the fixture must show the failure"
    assert chat_agent.encode_prompt("<bos><bos>a bird.") == chat_agent.encode_prompt("a bird.")


def test_a_tokenizer_without_bos_adds_nothing(tiny):
    agent = make_agent(0, *tiny, "builtin:tiny")
    assert agent.prefix_ids == ()
    assert agent.encode_prompt("a bird.") == agent.tokenizer("a bird.")["input_ids"]
    assert agent.encode_prompt("") == []


def test_a_finished_completion_from_text_ends_with_one_eos_and_a_cut_one_with_none(chat_agent):
    ids = chat_agent.encode_completion("a bird.", finished=True)
    assert ids[-1] == EOS
    assert ids.count(EOS) == 1
    assert BOS not in ids
    assert chat_agent.encode_completion("a bird.", finished=False) == ids[:-1]
    assert chat_agent.encode_completion("", finished=True) == [EOS]


def test_what_follows_an_eos_in_the_text_is_no_part_of_the_completion(chat_agent):
    ids = chat_agent.encode_completion("a bird.", finished=True)
    assert chat_agent.encode_completion("a bird.<eos>more<eos>", finished=True) == ids
    assert chat_agent.encode_completion("a bird.<eos>more<eos>", finished=False) == ids[:-1]


@pytest.mark.parametrize("text", ["a bird.", "  two  spaces ", "ümläut \n\t\u4f60\u597d", ""])
def test_text_comes_back_as_it_was_without_special_tokens(chat_agent, text):
    assert chat_agent.decode(chat_agent.encode_completion(text, finished=True)) == text
    assert chat_agent.decode(chat_agent.encode_prompt(text)) == text


def test_all_declared_eos_ids_are_found_and_only_the_last_is_left_out_of_the_text(two_eos_agent, dot_id):
    """Pitfall 5: `generation_config` declares a second one, which the tokenizer does not call special."""
    assert two_eos_agent.eos_ids == (EOS, dot_id)
    ids = [*two_eos_agent.tokenizer("a bird")["input_ids"], dot_id]
    assert two_eos_agent.decode(ids) == "a bird"


def test_eos_ids_outside_the_vocabulary_are_inherited_defaults_and_left_out(tiny):
    """GPT2Config says 50256 unless told otherwise."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    assert eos_ids(model, tiny[1]) == (EOS,)
    assert context_length(model) == 16


def test_a_tokenizer_without_pad_pads_with_eos(tiny):
    model, tokenizer = tiny
    tokenizer.pad_token = None
    assert make_agent(0, model, tokenizer, "x").pad_id == EOS


def test_pad_may_be_the_eos(absolute):
    agent = make_agent(0, *absolute, "x")
    assert agent.pad_id == EOS
    assert agent.eos_ids == (EOS,)
    assert agent.context_length == 96
    assert agent.device.type == "cpu"
