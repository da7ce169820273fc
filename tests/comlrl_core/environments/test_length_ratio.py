"""The length-ratio environment between turns."""

from comlrl_core.environments.length_ratio import transition
from comlrl_core.rollout.transition import Transition


def test_each_agent_is_told_the_lengths_its_own_first() -> None:
    found = transition("a song.", ["ab", "abcde"], 2, prompt_history_per_agent=None, response_history_per_agent=None)
    assert found == ["(you 2, other 5) a song.", "(you 5, other 2) a song."]


def test_any_number_of_agents() -> None:
    assert transition("p", ["", "a", "bb"], 3) == [
        "(you 0, other 1, other 2) p",
        "(you 1, other 0, other 2) p",
        "(you 2, other 0, other 1) p",
    ]
    assert transition("p", ["abc"], 1) == ["(you 3) p"]


def test_it_is_a_transition() -> None:
    assert Transition(transition).name == "transition"
