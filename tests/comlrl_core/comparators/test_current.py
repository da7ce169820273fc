"""`current`: the live team itself."""

from comlrl_core.comparators.current import current


def test_the_live_team_answers_and_outlives_the_collection(team) -> None:
    comparator = current(team)
    assert (comparator.policy, comparator.version, comparator.team) == ("current", "current", team)
    comparator.release()
    assert comparator.team is team and all(p.requires_grad for p in team.models[0].parameters())
