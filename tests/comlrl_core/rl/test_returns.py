"""Returns of trees and credits of combinations, by hand."""

import pytest
import torch
from torch import Tensor

from comlrl_core.rl.returns import cross_credit, tree_returns


def of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# K = 2, T = 3, aligned: 1 + 2 + 4 nodes of two branches, 8 leaves.
REWARDS = [
    of([1.0, 2.0]),
    of([10.0, 20.0], [30.0, 40.0]),
    of([1.0, 3.0], [5.0, 7.0], [9.0, 11.0], [0.0, 2.0]),
]
PARENTS = [torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3])]


def all_valid(rewards: list[Tensor]) -> list[Tensor]:
    return [torch.ones_like(level, dtype=torch.bool) for level in rewards]


def test_a_tree_of_two_branches_and_three_turns_by_hand() -> None:
    """Means of the leaves 2, 6, 10, 1.

    Second turn: 10 + 2 = 12, 20 + 6 = 26 (mean 19); 30 + 10 = 40, 40 + 1 = 41 (mean 40.5).
    First turn: 1 + 19 = 20, 2 + 40.5 = 42.5.
    """
    returns, valid = tree_returns(REWARDS, all_valid(REWARDS), PARENTS)
    assert sum(level.numel() for level in REWARDS[-1:]) == 8
    assert returns[2].tolist() == REWARDS[2].tolist()
    assert returns[1].tolist() == [[12.0, 26.0], [40.0, 41.0]]
    assert returns[0].tolist() == [[20.0, 42.5]]
    assert all(bool(level.all()) for level in valid)


def test_a_discount_weighs_every_level_once() -> None:
    """With 1/2: second turn 11, 23 (mean 17), 35, 40.5 (mean 37.75); first turn 1 + 8.5, 2 + 18.875."""
    returns, _ = tree_returns(REWARDS, all_valid(REWARDS), PARENTS, discount=0.5)
    assert returns[1].tolist() == [[11.0, 23.0], [35.0, 40.5]]
    assert returns[0].tolist() == [[9.5, 20.875]]


def test_a_branch_that_ended_early_keeps_its_own_reward() -> None:
    """The first branch of the first node has no node below it: its return is 1; the other's is 2 + (30 + 40) / 2."""
    rewards = [of([1.0, 2.0]), of([30.0, 40.0])]
    returns, _ = tree_returns(rewards, all_valid(rewards), [torch.tensor([0]), torch.tensor([1])])
    assert returns[0].tolist() == [[1.0, 37.0]]


def test_dropped_rewards_leave_the_means_and_an_unknown_future_is_not_zero() -> None:
    """Second turn: (dropped), 20 has mean 20; two dropped ones leave the second branch of the first turn unknown."""
    rewards = [of([1.0, 2.0]), of([float("nan"), 20.0], [float("nan"), float("nan")])]
    valid = [torch.tensor([[True, True]]), torch.tensor([[False, True], [False, False]])]
    returns, known = tree_returns(rewards, valid, [torch.tensor([0]), torch.tensor([0, 1])])
    assert returns[0].tolist() == [[21.0, 0.0]] and known[0].tolist() == [[True, False]]
    assert returns[1].tolist() == [[0.0, 20.0], [0.0, 0.0]]
    assert valid[0].tolist() == [[True, True]]  # the arguments stay as they are


def test_cross_credit_of_two_agents_by_hand() -> None:
    """Joint responses (a0 b0) (a0 b1) (a1 b0) (a1 b1) with returns 1, 2, 3, 5.

    Agent a: 1 + 2 = 3, 3 + 5 = 8. Agent b: 1 + 3 = 4, 2 + 5 = 7. Means: half of each.
    """
    returns = of([1.0, 2.0, 3.0, 5.0])
    credit, known = cross_credit(returns, torch.ones(1, 4, dtype=torch.bool), 2)
    assert credit.tolist() == [[[3.0, 8.0]], [[4.0, 7.0]]]
    assert bool(known.all()) and known.shape == (2, 1, 2)
    mean, _ = cross_credit(returns, torch.ones(1, 4, dtype=torch.bool), 2, "mean")
    assert mean.tolist() == [[[1.5, 4.0]], [[2.0, 3.5]]]


def test_cross_credit_of_three_agents_by_hand() -> None:
    """Returns 0 .. 7 in binary order: agent 0 owns the bit of 4, agent 1 that of 2, agent 2 that of 1.

    Agent 0: 0+1+2+3 = 6, 22. Agent 1: 0+1+4+5 = 10, 18. Agent 2: 0+2+4+6 = 12, 16.
    """
    credit, _ = cross_credit(torch.arange(8.0).view(1, 8), torch.ones(1, 8, dtype=torch.bool), 3)
    assert credit.tolist() == [[[6.0, 22.0]], [[10.0, 18.0]], [[12.0, 16.0]]]


def test_a_dropped_combination_is_not_a_return_of_zero() -> None:
    """(a0 b0) is dropped: a0 has 2 alone, counted for both of its combinations; b0 has 3 alone."""
    valid = torch.tensor([[False, True, True, True]])
    credit, known = cross_credit(of([float("nan"), 2.0, 3.0, 5.0]), valid, 2)
    assert credit.tolist() == [[[4.0, 8.0]], [[6.0, 7.0]]] and bool(known.all())
    nothing = torch.tensor([[False, False, True, True]])
    credit, known = cross_credit(of([9.0, 9.0, 3.0, 5.0]), nothing, 2)
    assert credit.tolist() == [[[0.0, 8.0]], [[6.0, 10.0]]]
    assert known.tolist() == [[[False, True]], [[True, True]]]


def test_one_agent_is_credited_with_its_own_returns() -> None:
    credit, _ = cross_credit(of([1.0, 2.0, 3.0]), torch.ones(1, 3, dtype=torch.bool), 1)
    assert credit.tolist() == [[[1.0, 2.0, 3.0]]]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="sum, mean"):
        cross_credit(of([1.0] * 4), torch.ones(1, 4, dtype=torch.bool), 2, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"K\^2"):
        cross_credit(of([1.0] * 5), torch.ones(1, 5, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="level 1 has 1 nodes"):
        tree_returns([of([1.0]), of([1.0])], all_valid([of([1.0])] * 2), [torch.tensor([0]), torch.tensor([0, 0])])
