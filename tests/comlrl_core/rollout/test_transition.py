"""Transitions: what the user's function is given, what becomes of its answer, and what is refused."""

from typing import Any

import pytest

from comlrl_core.errors import ConfigError, TransitionError
from comlrl_core.rollout.transition import KEYWORDS, Transition

ROW = {"task_id": "a", "prompt": "the red bird sings.", "topic": "birds"}
PROMPTS = [["[1] the red bird sings.\n"], ["[2] the red bird sings.\n"]]
RESPONSES = [["one"], ["two"]]


def test_it_is_called_with_exactly_the_published_keywords(team) -> None:
    seen: dict[str, Any] = {}

    def transition(**given):
        seen.update(given)
        given["prompt_history_per_agent"][0].append("spoilt")
        return ("x", "y")

    Transition(transition).next_prompts(team, ROW, PROMPTS, RESPONSES)
    assert tuple(seen) == KEYWORDS
    assert seen["prompt"] == ROW["prompt"] and seen["num_agents"] == 2
    assert list(seen["agent_completions"]) == ["one", "two"]
    assert seen["response_history_per_agent"] == RESPONSES
    assert len(PROMPTS[0]) == 1  # what the function does to its arguments stays there


def test_a_returned_text_becomes_the_prompt_field_and_goes_through_the_formatter(team, echo) -> None:
    found = Transition(echo).next_prompts(team, ROW, PROMPTS, RESPONSES)
    assert found == ("[1] the red bird sings. one\n", "[2] the red bird sings. two\n")


def test_with_passthrough_it_is_used_as_it_is(team, echo) -> None:
    found = Transition(echo, passthrough=True).next_prompts(team, ROW, PROMPTS, RESPONSES)
    assert found == ("the red bird sings. one", "the red bird sings. two")


def test_a_task_without_the_field_prompt_is_named_by_its_first_prompt(team, echo) -> None:
    row = {"task_id": "a", "topic": "birds"}
    found = Transition(echo, passthrough=True).next_prompts(team, row, PROMPTS, RESPONSES)
    assert found[0] == "[1] the red bird sings.\n one"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["only one"], "returned 1 prompts for 2 agents"),
        (["a", "b", "c"], "returned 3 prompts for 2 agents"),
        ("ab", "returned a str"),
        (None, "returned a NoneType"),
        ({"0": "a", "1": "b"}, "returned a dict"),
        (["a", 2], "returned a int for agent 1"),
    ],
)
def test_a_transition_returning_the_wrong_thing_is_named(team, answer: Any, message: str) -> None:
    def my_transition(**_):
        return answer

    with pytest.raises(TransitionError, match=rf"my_transition \(task a, turn 1\) {message}"):
        Transition(my_transition).next_prompts(team, ROW, PROMPTS, RESPONSES)


def test_what_it_raises_is_not_swallowed(team) -> None:
    def broken(**_):
        raise KeyError("missing")

    with pytest.raises(TransitionError, match=r"broken .* raised KeyError") as caught:
        Transition(broken).next_prompts(team, ROW, PROMPTS, RESPONSES)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_cannot_take_the_keywords_is_refused_at_once() -> None:
    def narrow(prompt, agent_completions):
        return agent_completions

    with pytest.raises(ConfigError, match=r"narrow\(prompt, agent_completions\) cannot be called"):
        Transition(narrow)
    with pytest.raises(ConfigError, match="a str cannot be called"):
        Transition("text")  # type: ignore[arg-type]
