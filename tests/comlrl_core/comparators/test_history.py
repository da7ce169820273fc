"""`history`: the team of some iterations ago."""

import pytest

from comlrl_core.comparators.history import history, history_index


@pytest.mark.parametrize(
    ("iteration", "k", "index"),
    [
        # In iteration n the live team is that of n - 1; k = 1 is the one before it.
        (1, None, 0),
        (2, None, 0),
        (3, None, 1),
        (3, 1, 1),
        (5, 2, 2),
        (5, 4, 0),
        (5, 100, 0),
    ],
)
def test_which_iteration_answers(iteration: int, k: int | None, index: int) -> None:
    assert history_index(iteration, k) == index


def test_the_past_team_is_loaded_once_and_named(team) -> None:
    asked = []

    def load(index: int):
        asked.append(index)
        return team

    comparator = history(4, 2, load)
    assert asked == [1]
    assert (comparator.policy, comparator.version, comparator.team) == ("history", "iteration_0001", team)
    comparator.release()
    assert comparator.team is None
