"""`model`: fixed models by name."""

from comlrl_core.comparators.model import model


def test_the_named_models_answer(team) -> None:
    asked = []

    def load(sources):
        asked.append(list(sources))
        return team

    comparator = model(["a", "b", "a"], load)
    assert asked == [["a", "b", "a"]]
    assert (comparator.policy, comparator.version, comparator.team) == ("model", "a, b", team)
