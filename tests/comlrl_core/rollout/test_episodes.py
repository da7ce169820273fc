"""Targets and advantages of episodes by hand: what follows, what ends, what is dropped, whose penalty it is."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from comlrl_core.critics.critic import View
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.protocol import Engine
from comlrl_core.rollout.episodes import TemporalDifference, episode_samples
from comlrl_core.rollout.samples import divergence, prompt_ids
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import TreeShape, grow
from comlrl_core.team.team import load_team


class NumberedCritic:
    """Says the next numbers of a list, and remembers what it saw."""

    engine: Engine
    shares_backbone = False
    modules: list[nn.Module] = []  # noqa: RUF012
    max_length = None

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = list(numbers)
        self.seen: list[Sequence[View]] = []

    def encode(self, views):
        self.seen += views
        return [(len(self.seen), index) for index in range(len(views))]

    def values(self, inputs, tokens_per_batch=None):
        taken, self.numbers = self.numbers[: len(inputs)], self.numbers[len(inputs) :]
        return taken

    def backward(self, inputs, loss): ...


def central(*numbers: float) -> Critics:
    return Critics((NumberedCritic(numbers),), True, 2)


def rolled(team, tasks, sampling, scorer, **shape):
    transition = shape.pop("transition", None)
    return grow(team, scorer, tasks, TreeShape(**shape), sampling=sampling, stream=(0, "test"), transition=transition)


def collected(team, critics, tasks, levels, sampling, rule=None, **arguments):
    return episode_samples(
        team, critics, tasks, levels, rule or TemporalDifference(), sampling=sampling, stream=(0, "test"), **arguments
    )


def advantages(found) -> list[list[float | None]]:
    """Of the first agent, sample by sample."""
    return [list(sample.advantages[0]) for sample in found.samples]


def targets(found, critic: int = 0) -> list[tuple[tuple[float, ...], ...]]:
    return [sample.lessons[critic].targets for sample in found.samples]


def test_two_turns_by_hand(team, tasks, sampling, scorer, echo) -> None:
    """Rewards 1, 2 in the first turn and 10, 20 in the second; values 3, 4 and 5, 6; discount 0.5.

    Targets: 1 + 0.5 * 5 = 3.5, 2 + 0.5 * 6 = 5; then 10, 20. Deltas: 0.5, 1; 5, 14.
    """
    levels = rolled(
        team, tasks, sampling, scorer([1, 2, 10, 20]), num_generations=1, num_turns=2, transition=Transition(echo)
    )
    critics = central(3, 4, 5, 6)
    found = collected(team, critics, tasks, levels, sampling, TemporalDifference(discount=0.5), version=7)
    assert [(s.turn, s.version) for s in found.samples] == [(1, 7), (2, 7), (1, 7), (2, 7)]  # episode by episode
    assert targets(found) == [((3.5,),), ((10.0,),), ((5.0,),), ((20.0,),)]
    assert advantages(found) == [[0.5], [5.0], [1.0], [14.0]]
    assert all(sample.advantages[0] == sample.advantages[1] for sample in found.samples)
    assert [sample.lessons[0].old_values for sample in found.samples] == [(3.0,), (5.0,), (4.0,), (6.0,)]
    assert found.joint_responses == 4
    assert found.metrics["critic/value_mean"] == 4.5 and found.metrics["critic/target_mean"] == 38.5 / 4
    assert found.metrics["turn_1/expected_return"] == (1 + 5 + 2 + 10) / 2
    assert found.metrics["critic/advantage_mean"] == 20.5 / 4
    assert found.metrics["critic/advantage_std"] == pytest.approx(
        torch.tensor([0.5, 5, 1, 14]).std(correction=0).item()
    )
    residual = torch.tensor([0.5, 1, 5, 14]).double().var(correction=0)
    spread = torch.tensor([3.5, 5, 10, 20]).double().var(correction=0)
    assert found.metrics["critic/explained_variance"] == pytest.approx(1 - (residual / spread).item())


def test_what_a_critic_sees(team, tasks, sampling, scorer, echo) -> None:
    """V: every prompt so far and the responses before. Q: this turn's response too. All agents, or one."""
    levels = rolled(
        team, tasks[:1], sampling, scorer([1, 2]), num_generations=1, num_turns=2, transition=Transition(echo)
    )
    node = levels[1][0]
    critics = central(0, 0)
    collected(team, critics, tasks, levels, sampling)
    first, second = critics.critics[0].seen
    assert [view.history.prompts for view in second] == list(node.prompts)
    assert [view.history.responses for view in second] == list(node.responses)
    assert [len(view.history.responses) for view in first] == [0, 0]
    assert [list(view.prompt_ids) for view in second] == [team.encode(p, a, 4) for a, p in enumerate(node.own_prompts)]
    assert all(view.response_ids == () for view in second)

    own = Critics((NumberedCritic([0] * 12), NumberedCritic([0] * 12)), False, 2)
    collected(team, own, tasks, levels, sampling, TemporalDifference("q", q_baseline_samples=1))
    for agent, critic in enumerate(own.critics):
        (view,) = critic.seen[1]
        assert view.history.prompts == node.prompts[agent]
        assert view.history.responses == (*node.responses[agent], node.answers[agent][0].text)
        assert view.response_ids == node.answers[agent][0].token_ids


def test_nothing_follows_a_stopped_turn(team, tasks, sampling, scorer, echo) -> None:
    """The first episode is stopped by its reward of 0.9; the second goes on."""
    levels = rolled(
        team, tasks, sampling, scorer([0.9, 0.1, 0.3]), num_generations=1, num_turns=2, transition=Transition(echo),
        early_termination_threshold=0.5,
    )  # fmt: skip
    found = collected(team, central(0.5, 0.25, 2.0), tasks, levels, sampling)
    assert targets(found) == [((0.9,),), ((2.1,),), ((0.3,),)]


def test_candidates_of_one_turn_share_a_history(team, tasks, sampling, scorer) -> None:
    levels = rolled(team, tasks, sampling, scorer([1, 2, 3, 4, None, 6]), num_generations=3)
    found = collected(team, central(1.5, 5.0), tasks, levels, sampling)
    assert [len(sample.lessons[0].inputs) for sample in found.samples] == [1, 1]
    assert targets(found) == [((1.0, 2.0, 3.0),), ((4.0, 6.0),)]  # the dropped one teaches nothing
    assert advantages(found) == [[-0.5, 0.5, 1.5], [-1.0, None, 1.0]]
    assert found.metrics["dropped"] == 1.0


def test_q_against_the_other_candidates_by_hand(team, tasks, sampling, scorer) -> None:
    """Q 1, 2, 6 less 4, 3.5, 1.5. In the second node the middle one was dropped: 5 less 9, 9 less 5."""
    levels = rolled(team, tasks, sampling, scorer([0.1, 0.2, 0.3, 4, None, 6]), num_generations=3)
    found = collected(team, central(1, 2, 6, 5, 7, 9), tasks, levels, sampling, TemporalDifference("q"))
    assert advantages(found) == [[-3.0, -1.5, 4.5], [-4.0, None, 4.0]]
    assert targets(found) == [((0.1,), (0.2,), (0.3,)), ((4.0,), (6.0,))]
    assert [lesson.old_values for sample in found.samples for lesson in sample.lessons] == [(1, 2, 6), (5, 9)]


def test_q_of_the_next_response_is_what_follows(team, tasks, sampling, scorer, echo) -> None:
    """One candidate: Q 3 and 5, each less the mean of two sampled responses: 1 and 2, 4 and 8."""
    levels = rolled(
        team, tasks[:1], sampling, scorer([1, 10]), num_generations=1, num_turns=2, transition=Transition(echo)
    )
    critics = central(3, 5, 1, 2, 4, 8)
    rule = TemporalDifference("q", discount=0.5, q_baseline_samples=2)
    found = collected(team, critics, tasks, levels, sampling, rule)
    assert targets(found) == [((3.5,),), ((10.0,),)]
    assert advantages(found) == [[1.5], [-1.0]]
    others = [entry[0].response_ids for entry in critics.critics[0].seen[2:4]]
    assert others[0] != others[1] and levels[0][0].answers[0][0].token_ids not in others


def test_a_lone_candidate_left_over_has_no_advantage(team, tasks, sampling, scorer) -> None:
    levels = rolled(team, tasks[:1], sampling, scorer([None, 2.0]), num_generations=2)
    found = collected(team, central(5, 7), tasks, levels, sampling, TemporalDifference("q"))
    assert advantages(found) == [[None, 0.0]]


def test_whose_penalty_it_is(team, tasks, sampling, scorer) -> None:
    """A central critic learns the reward, and each agent's advantage loses its own divergence; a critic of one agent
    learns the reward without it."""
    reference = load_team(
        agent_model="builtin:tiny", num_agents=2, formatters=["[1] {prompt}\n", "[2] {prompt}\n"], seed=5
    )
    levels = rolled(team, tasks[:1], sampling, scorer([1.0]), num_generations=1)
    prompts = prompt_ids(team, levels[0], 4)
    answers = [[node.answers[agent] for node in levels[0]] for agent in (0, 1)]
    paid = [
        0.1 * divergence(team, reference, agent, prompts[agent], answers[agent], 1.0, None).item() for agent in (0, 1)
    ]
    assert paid[0] > 1e-4 and paid[1] > 1e-4 and paid[0] != paid[1]
    rule = TemporalDifference(kl_coef=0.1)
    joint = collected(team, central(0.25), tasks, levels, sampling, rule, reference=reference)
    assert targets(joint) == [((1.0,),)]
    assert [a[0] for a in joint.samples[0].advantages] == pytest.approx([0.75 - paid[0], 0.75 - paid[1]], abs=1e-12)
    own = Critics((NumberedCritic([0.25]), NumberedCritic([0.5])), False, 2)
    found = collected(team, own, tasks, levels, sampling, rule, reference=reference)
    assert [targets(found, critic)[0][0][0] for critic in (0, 1)] == pytest.approx(
        [1 - paid[0], 1 - paid[1]], abs=1e-12
    )
    assert [a[0] for a in found.samples[0].advantages] == pytest.approx([0.75 - paid[0], 0.5 - paid[1]], abs=1e-12)
    assert found.metrics["kl/agent_1"] == pytest.approx(paid[0] / 0.1)


def test_an_episode_that_was_dropped_gives_no_sample(team, tasks, sampling, scorer) -> None:
    levels = rolled(team, tasks, sampling, scorer([None, 1.0]), num_generations=1)
    found = collected(team, central(1, 2), tasks, levels, sampling)
    assert len(found.samples) == 1 and found.samples[0].lessons[0].old_values == (2.0,)
    nothing = rolled(team, tasks, sampling, scorer([None, None]), num_generations=1)
    empty = collected(team, central(1, 2), tasks, nothing, sampling)
    assert empty.samples == [] and "critic/value_mean" not in empty.metrics
