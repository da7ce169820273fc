"""Rollout trees: what is sampled, in how many calls, what the functions see, and where a branch ends."""

from typing import Any

import pytest

from comlrl_core.errors import ConfigError
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import TreeShape, credits, grow
from comlrl_core.team import team as team_module
from comlrl_core.team.generation import generate


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each call of `generate`."""
    counted: list[int] = []

    def counting(model, prompt_ids, **arguments):
        counted.append(len(prompt_ids))
        return generate(model, prompt_ids, **arguments)

    monkeypatch.setattr(team_module, "generate", counting)
    return counted


def rolled(team, tasks, sampling, scorer, transition=None, *, stream=(0, "test"), **shape: Any):
    return grow(team, scorer, tasks, TreeShape(**shape), sampling=sampling, stream=stream, transition=transition)


def test_one_generate_call_per_agent_and_turn(team, tasks, sampling, scorer, echo, generations) -> None:
    """K = 2, T = 3, two tasks: 2, 4 and 8 nodes; each turn is one call per agent and one of the scorer."""
    one = scorer([0.0] * 28)
    levels = rolled(team, tasks, sampling, one, Transition(echo), num_generations=2, num_turns=3)
    assert [len(level) for level in levels] == [2, 4, 8]
    assert generations == [2, 2, 4, 4, 8, 8]
    assert len(one.calls) == 3 and sum(len(node.scores) for level in levels for node in level) == 28
    assert sum(len(node.scores) for node in levels[2]) == 2 * 2**3  # K^T leaves per task


def test_cross_mode_scores_every_combination_of_few_samples(team, tasks, sampling, scorer, echo, generations) -> None:
    """K = 2, N = 2, T = 2: 4 joint responses per node, 4 nodes below, 16 leaves (K^(N T)); 2 samples per agent."""
    one = scorer([0.0] * 20)
    levels = rolled(
        team, tasks[:1], sampling, one, Transition(echo), num_generations=2, num_turns=2, joint_mode="cross"
    )
    assert [len(level) for level in levels] == [1, 4] and generations == [1, 1, 4, 4]
    assert sum(len(node.scores) for node in levels[1]) == 16
    root = levels[0][0]
    texts = [[answer.text for answer in of_agent] for of_agent in root.answers]
    a, b = texts
    assert one.calls[0]["completions"] == [[a[0], a[0], a[1], a[1]], [b[0], b[1], b[0], b[1]]]


def test_every_branch_has_its_own_histories(team, tasks, sampling, scorer) -> None:
    calls: list[dict[str, Any]] = []

    def transition(**given):
        calls.append(given)
        return [f"turn {len(given['response_history_per_agent'][0]) + 1} for {i}" for i in range(2)]

    levels = rolled(
        team, tasks[:1], sampling, scorer([0.0] * 14), Transition(transition), num_generations=2, num_turns=3
    )
    assert len(calls) == 2 + 4  # one per branch that goes on
    for call, node in zip(calls, [*levels[1], *levels[2]], strict=True):
        assert call["prompt"] == tasks[0]["prompt"]
        assert call["prompt_history_per_agent"] == [list(prompts[:-1]) for prompts in node.prompts]
        assert call["response_history_per_agent"] == [list(texts) for texts in node.responses]
        assert call["agent_completions"] == [texts[-1] for texts in node.responses]
    leaf = levels[2][3]
    first, second = leaf.path
    assert leaf.prompts[1] == ("[2] the red bird sings.\n", "[2] turn 2 for 1\n", "[2] turn 3 for 1\n")
    assert leaf.responses[0] == (
        levels[0][0].answers[0][first].text,
        levels[1][first].answers[0][second].text,
    )
    assert [node.path for node in levels[2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [node.parent for node in levels[2]] == [0, 1, 2, 3]


def test_the_scorer_sees_the_task_and_the_prompts_of_the_turn(team, tasks, sampling, scorer, echo) -> None:
    one = scorer([0.0] * 6)
    levels = rolled(team, tasks[:1], sampling, one, Transition(echo), num_generations=2, num_turns=2)
    assert one.calls[1]["batch_items"] == [tasks[0]] * 4
    assert one.calls[1]["prompts"] == [list(node.own_prompts) for node in levels[1] for _ in range(2)]


def test_a_sample_does_not_depend_on_what_is_rolled_out_beside_it(team, tasks, sampling, scorer, echo) -> None:
    both = rolled(team, tasks, sampling, scorer([0.0] * 12), Transition(echo), num_generations=2, num_turns=2)
    alone = rolled(team, tasks[1:], sampling, scorer([0.0] * 6), Transition(echo), num_generations=2, num_turns=2)
    assert [n.answers for n in both[1] if n.task == 1] == [n.answers for n in alone[1]]
    other = rolled(team, tasks[1:], sampling, scorer([0.0] * 2), num_generations=2, stream=(1, "test"))
    assert other[0][0].answers != alone[0][0].answers


def test_nodes_of_one_prompt_do_not_repeat_each_other(team, tasks, sampling, scorer) -> None:
    """Every path has streams of its own, also where the prompts are the same."""
    same = Transition(lambda **_: ["again", "again"])
    levels = rolled(team, tasks[:1], sampling, scorer([0.0] * 14), same, num_generations=2, num_turns=3)
    drawn = [node.answers for level in levels[1:] for node in level]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("threshold", "grown"), [(None, 2), (0.5, 1), (0.4, 0), (-0.2, 0)])
def test_a_node_above_the_threshold_grows_no_branches(
    team, tasks, sampling, scorer, echo, threshold: float | None, grown: int
) -> None:
    """Mean rewards 0.45 and 0.55: none above 0.6, the second above 0.5, both above 0.4 and above the published -0.2."""
    numbers = [0.4, 0.5, 0.5, 0.6] + [0.0] * 8
    levels = rolled(
        team, tasks, sampling, scorer(numbers), Transition(echo),
        num_generations=2, num_turns=2, early_termination_threshold=threshold,
    )  # fmt: skip
    assert len({node.task for node in levels[1]} if len(levels) > 1 else ()) == grown


def test_a_dropped_joint_response_grows_no_branch(team, tasks, sampling, scorer, echo) -> None:
    levels = rolled(
        team, tasks[:1], sampling, scorer([None, 1.0, 2.0, 4.0]), Transition(echo), num_generations=2, num_turns=2
    )
    assert [node.path for node in levels[1]] == [(1,)]
    returns, known, credit, counted = credits(levels, 2, "aligned", "sum", 1.0)
    assert returns[0].tolist() == [[0.0, 4.0]] and known[0].tolist() == [[False, True]]  # 1 + (2 + 4) / 2
    assert credit[0].tolist() == [[[0.0, 4.0]]] * 2 and counted[0].tolist() == [[[False, True]]] * 2


def test_aligned_tree_by_hand(team, tasks, sampling, scorer, echo) -> None:
    """K = 2, T = 3, the numbers of rl/test_returns.py: the first turn's returns are 20 and 42.5 for both agents."""
    numbers = [1.0, 2.0, 10, 20, 30, 40, 1, 3, 5, 7, 9, 11, 0, 2]
    levels = rolled(team, tasks[:1], sampling, scorer(numbers), Transition(echo), num_generations=2, num_turns=3)
    returns, _, credit, _ = credits(levels, 2, "aligned", "sum", 1.0)
    assert returns[0].tolist() == [[20.0, 42.5]] and returns[1].tolist() == [[12.0, 26.0], [40.0, 41.0]]
    assert credit[0].tolist() == [[[20.0, 42.5]]] * 2
    assert credit[1].shape == (2, 2, 2)


def test_cross_tree_of_two_agents_by_hand(team, tasks, sampling, scorer, echo) -> None:
    """K = 2, N = 2, T = 2: first-turn rewards 1, 2, 3, 4; their nodes' means 10, 20, 30, 40.

    Returns 11, 22, 33, 44. Agent 0: 11 + 22 = 33, 33 + 44 = 77. Agent 1: 11 + 33 = 44, 22 + 44 = 66. The second node
    of the second turn has rewards 17, 19, 21, 23: agent 0 36, 44, agent 1 38, 42.
    """
    second = [mean + offset for mean in (10.0, 20.0, 30.0, 40.0) for offset in (-3, -1, 1, 3)]
    levels = rolled(
        team, tasks[:1], sampling, scorer([1.0, 2.0, 3.0, 4.0, *second]), Transition(echo),
        num_generations=2, num_turns=2, joint_mode="cross",
    )  # fmt: skip
    returns, _, credit, _ = credits(levels, 2, "cross", "sum", 1.0)
    assert returns[0].tolist() == [[11.0, 22.0, 33.0, 44.0]]
    assert credit[0].tolist() == [[[33.0, 77.0]], [[44.0, 66.0]]]
    assert credit[1][:, 1].tolist() == [[36.0, 44.0], [38.0, 42.0]]
    assert credits(levels, 2, "cross", "mean", 1.0)[2][0].tolist() == [[[16.5, 38.5]], [[22.0, 33.0]]]


def test_several_turns_need_a_transition(team, tasks, sampling, scorer) -> None:
    with pytest.raises(ConfigError, match="external_transition is required"):
        rolled(team, tasks, sampling, scorer([]), num_generations=2, num_turns=2)


def test_a_tree_beyond_all_reason_is_refused() -> None:
    assert TreeShape(4, 3, "aligned").nodes_per_task(5) == 1 + 4 + 16
    assert TreeShape(2, 2, "cross").nodes_per_task(2) == 1 + 4
    with pytest.raises(ConfigError, match="leaves per task"):
        TreeShape(8, 3, "cross").nodes_per_task(3)
