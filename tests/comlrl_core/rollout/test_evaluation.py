"""Evaluation over turns."""

from comlrl_core.evaluation import evaluate
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.rollout.evaluation import evaluate_turns
from comlrl_core.rollout.transition import Transition


def test_the_first_turn_is_what_a_single_turn_evaluation_samples(team, tasks, sampling, echo) -> None:
    oracle = Oracle(length_ratio, 2)
    expected = evaluate(team, oracle, tasks, samples_per_task=1, sampling=sampling, seed=3)
    for batch_size in (None, 1):
        turns = evaluate_turns(
            team, oracle, tasks, num_turns=2, transition=Transition(echo), sampling=sampling, seed=3,
            batch_size=batch_size,
        )  # fmt: skip
        assert turns[0] == expected
        assert [sample.task_id for sample in turns[1]] == ["a", "b"] and turns[1] != expected


def test_a_dropped_reward_ends_a_chain(team, tasks, sampling, echo) -> None:
    oracle = Oracle(lambda a, b: [None, 0.5][: len(a)] if len(a) == 2 else [0.25], 2, on_bad_reward="drop")
    turns = evaluate_turns(team, oracle, tasks, num_turns=2, transition=Transition(echo), sampling=sampling, seed=0)
    assert [sample.reward for sample in turns[0]] == [None, 0.5]
    assert [(sample.task_id, sample.reward) for sample in turns[1]] == [("b", 0.25)]
