"""The buffer between rollouts and updates."""

import pytest

from comlrl_core.rollout.buffer import NodeSample, RolloutBuffer, minibatches


def node(turn: int, name: int = 0) -> NodeSample:
    return NodeSample(turn, 0, ((name,),), (((1,), (2,)),), ((0.5, None),), (False,))


def names(batches: list[list[NodeSample]]) -> list[list[int]]:
    return [[sample.prompts[0][0] for sample in batch] for batch in batches]


def test_it_waits_until_its_nodes_are_there() -> None:
    buffer = RolloutBuffer(3)
    for name in range(2):
        buffer.add(node(1, name))
    assert (len(buffer), buffer.room) == (2, 1)
    buffer.add(node(1, 2))
    assert buffer.room == 0 and names(buffer.drain()) == [[0, 1, 2]]
    assert (len(buffer), buffer.room) == (0, 3) and buffer.drain() == []


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [(None, [[0, 3], [1, 2, 4, 5]]), (2, [[0, 3], [1, 2], [4, 5]]), (3, [[0, 3], [1, 2, 4], [5]]), (1, None)],
)
def test_a_minibatch_never_mixes_turns(batch_size: int | None, expected: list | None) -> None:
    """Two trees of one node and two below: turns 1 2 2 1 2 2 in the order of the rollouts."""
    buffer = RolloutBuffer(6, batch_size)
    for name, turn in enumerate([1, 2, 2, 1, 2, 2]):
        buffer.add(node(turn, name))
    assert names(buffer.drain()) == (expected or [[0], [3], [1], [2], [4], [5]])


def test_minibatches_of_nothing() -> None:
    assert minibatches([], 4) == []


def test_completions_that_count() -> None:
    assert node(1).counted(0) == 1
