"""Rows to prompts."""

import pytest

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.team.formatters import render, resolve_formatters, text_formatter, text_formatters

ROW = {"task_id": "t1", "prompt": "a bird.", "n": 3}


def test_the_default_is_the_field_prompt_for_every_agent():
    assert [formatter(ROW) for formatter in resolve_formatters(None, 2)] == ["a bird.", "a bird."]
    with pytest.raises(DataError, match=r"'prompt'.*task 't2'.*task_id, text"):
        resolve_formatters(None, 1)[0]({"task_id": "t2", "text": "x"})


def test_one_function_serves_all_agents_and_a_list_serves_each():
    first, second = resolve_formatters(lambda row: row["prompt"].upper(), 2)
    assert first(ROW) == second(ROW) == "A BIRD."
    mixed = resolve_formatters(["[1] {prompt}\n", lambda row: "two", None], 3)
    assert [formatter(ROW) for formatter in mixed] == ["[1] a bird.\n", "two", "a bird."]


@pytest.mark.parametrize("spec", [["{prompt}"], [None, None, None]])
def test_a_list_of_another_length_than_the_team_is_refused(spec):
    with pytest.raises(ConfigError, match=f"{len(spec)} formatters for 2 agents"):
        resolve_formatters(spec, 2)
    with pytest.raises(ConfigError, match="agent 1 must be a function or a text"):
        resolve_formatters([None, 7], 2)


def test_templates_fill_fields_and_leave_other_braces_alone():
    assert text_formatter("{n}: {prompt} {} {a b} {{n}}")(ROW) == "3: a bird. {} {a b} {n}"
    with pytest.raises(DataError, match=r"'title'.*'t1'"):
        text_formatter("{title}")(ROW)


def test_braces_in_a_row_are_text_not_fields():
    assert text_formatter("{prompt}")({"prompt": "{n} {{x}}"}) == "{n} {{x}}"


def test_a_system_prompt_makes_a_chat():
    first, second = text_formatters(2, "Say {prompt}", ["You are {n}.", None])
    assert first(ROW) == [
        {"role": "system", "content": "You are 3."},
        {"role": "user", "content": "Say a bird."},
    ]
    assert second(ROW) == "Say a bird."
    with pytest.raises(ConfigError, match="3 system prompts for 2 agents"):
        text_formatters(2, None, ["a", "b", "c"])


def test_messages_are_rendered_with_the_template_and_its_generation_prompt(chat):
    _, tokenizer = chat
    messages = text_formatters(1, None, "Be brief.")[0](ROW)
    assert render(tokenizer, messages) == "<bos>[system] Be brief.<eos>[user] a bird.<eos>[assistant] "
    assert render(tokenizer, "as it is") == "as it is"


def test_messages_without_a_template_name_the_way_out(tiny):
    with pytest.raises(ConfigError, match="chat template"):
        render(tiny[1], [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("value", [None, 3, [], ["text"], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_anything_else_from_a_formatter_is_refused(chat, value):
    with pytest.raises(ConfigError, match="a formatter must return"):
        render(chat[1], value)


def test_a_template_that_refuses_the_messages_is_named(chat):
    _, tokenizer = chat
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ConfigError, match="System role not supported"):
        render(tokenizer, [{"role": "system", "content": "x"}])
