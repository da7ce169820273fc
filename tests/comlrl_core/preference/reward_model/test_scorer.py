"""A reward model in the place of a reward function."""

import pytest

from comlrl_core.errors import DataError, RewardError
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.preference.reward_model import JointText, LearnedReward, learned_oracle, open_reward_model
from comlrl_core.preference.scoring import score_candidates


def test_scores_as_the_model_does(tiny) -> None:
    oracle = learned_oracle(tiny)
    scored = oracle.score([["x", "the bird"], ["y", "sings"]], [{}, {}], ["p\n", ["q\n", "r\n"]])
    expected = tiny.score([JointText(("p\n", "p\n"), ("x", "y")), JointText(("q\n", "r\n"), ("the bird", "sings"))])
    assert [s.processed for s in scored] == [s.raw for s in scored] == expected


def test_is_known_by_its_weights(tiny) -> None:
    oracle = learned_oracle(tiny)
    assert oracle.label == f"reward_model@{tiny.fingerprint()[:16]}"
    assert learned_oracle(open_reward_model("builtin:tiny", 2, head_seed=5)).label != oracle.label


def test_scores_candidates(tiny) -> None:
    joint = JointResponse(0, "current", (Completion("x", (5,), True), Completion("y", None, True)))
    result = score_candidates([TaskCandidates("t", {}, ("p\n", "q\n"), [joint])], learned_oracle(tiny))
    assert result.candidates[0].current[0].reward == tiny.score([JointText(("p\n", "q\n"), ("x", "y"))])[0]


def test_responses_that_do_not_fit_are_dropped_or_refused() -> None:
    model = open_reward_model("builtin:tiny", 2, max_length=30)
    answers = [["X" * 40, "x"], ["y", "y"]]
    dropped, kept = learned_oracle(model, "drop").score(answers, [{}, {}], ["p", "p"])
    assert dropped.dropped and dropped.processed is None
    assert not kept.dropped
    with pytest.raises(RewardError, match="reward_model returned None"):
        learned_oracle(model).score(answers, [{}, {}], ["p", "p"])


def test_another_number_of_agents(tiny) -> None:
    with pytest.raises(DataError, match="3 lists of completions for a reward model of 2 agents"):
        LearnedReward(tiny)([""], [""], [""], prompts=["p"])
