"""Returns of a rollout tree, and whose completion is credited with them.

A tree is given level by level (turn by turn). Level `t` has `n_t` nodes with `B` branches each, one per joint response;
`parents[t]` says from which branch of the level above each node grew.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

CrossAggregation = Literal["sum", "mean"]


def tree_returns(
    rewards: Sequence[Tensor], valid: Sequence[Tensor], parents: Sequence[Tensor], discount: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Return of every branch: its own reward plus the mean return of the node that grew from it (TreeRPO,
    arXiv 2506.05183).

    A branch that is not valid leaves its node's mean. A branch whose node has no valid branch at all becomes invalid
    too: what follows it is unknown, which is not the same as nothing.

    Args:
        rewards: immediate rewards per level, `[n_t, B]` each, floating; anything where not valid.
        valid: True means the reward counts, Bool `[n_t, B]` per level.
        parents: per level Long `[n_t]`, `node * B + branch` in the level above; ignored for the first.
        discount: weight of what follows, once per level (1 = none).

    Returns:
        returns `[n_t, B]` and valid `[n_t, B]` per level; returns are 0 where not valid.

    Raises:
        ValueError: shapes do not belong together.
    """
    if not len(rewards) == len(valid) == len(parents):
        raise ValueError(f"{len(rewards)} levels of rewards, {len(valid)} of valid, {len(parents)} of parents")
    returns = [reward.masked_fill(~ok, 0.0) for reward, ok in zip(rewards, valid, strict=True)]
    known = [ok.clone() for ok in valid]
    for level in range(len(rewards) - 1, 0, -1):
        parent = parents[level]
        if parent.shape != (len(returns[level]),):
            raise ValueError(f"level {level} has {len(returns[level])} nodes and parents {tuple(parent.shape)}")
        mean, some = _node_means(returns[level], known[level])
        shape = returns[level - 1].shape
        above = returns[level - 1].reshape(-1).index_add(0, parent, discount * mean).view(shape)
        unknown = torch.zeros_like(known[level - 1]).reshape(-1).index_fill(0, parent[~some], True)
        known[level - 1] = known[level - 1] & ~unknown.view(shape)
        returns[level - 1] = above.masked_fill(~known[level - 1], 0.0)
    return returns, known


def cross_credit(
    returns: Tensor, valid: Tensor, num_agents: int, aggregation: CrossAggregation = "sum"
) -> tuple[Tensor, Tensor]:
    """Credit of every agent's completions where each joint response combines one completion of every agent.

    A completion is credited with all `K^(N-1)` joint responses that contain it: with the sum of their returns, or with
    the mean. Returns that are not valid are replaced by the mean of the completion's valid ones, so that a sum does not
    take a missing return for a return of 0; a completion without any valid return has no credit.

    Args:
        returns: `[G, K^N]`; the joint responses of a node in the order of `itertools.product` (last agent fastest).
        valid: True means the return counts, Bool `[G, K^N]`.
        num_agents: N.
        aggregation: `sum` or `mean`.

    Returns:
        credit `[N, G, K]` and valid `[N, G, K]`; 0 where not valid.

    Raises:
        ValueError: an unknown aggregation, or `K^N` joint responses of no whole `K`.
    """
    if aggregation not in get_args(CrossAggregation):
        raise ValueError(f"aggregation is {aggregation!r}; allowed are {', '.join(get_args(CrossAggregation))}")
    groups, joint = returns.shape
    size = round(joint ** (1 / num_agents))
    if size**num_agents != joint:
        raise ValueError(f"{joint} joint responses are no K^{num_agents} for a whole K")
    shape = (groups, *[size] * num_agents)
    means, known = [], []
    for agent in range(num_agents):
        own = returns.view(shape).movedim(1 + agent, 1).reshape(groups * size, -1)
        ok = valid.view(shape).movedim(1 + agent, 1).reshape(groups * size, -1)
        mean, some = _node_means(own, ok)
        means.append(mean.view(groups, size))
        known.append(some.view(groups, size))
    credit = torch.stack(means)
    if aggregation == "sum":
        credit = credit * (joint // size)
    return credit, torch.stack(known)


def _node_means(returns: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the valid entries of each row (0 where there is none) and whether there is one."""
    count = valid.sum(dim=1)
    return returns.masked_fill(~valid, 0.0).sum(dim=1) / count.clamp(min=1), count > 0
