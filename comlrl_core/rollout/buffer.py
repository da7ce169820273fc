"""Samples of rollout nodes, and the buffer in which they wait for an update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Ids = tuple[int, ...]


@dataclass(frozen=True)
class NodeSample:
    """What one node gives to every agent's update; per agent, in agent order.

    Attributes:
        turn: of the node, from 1.
        version: optimizer steps that the team had made when it was sampled.
        prompts: token ids of each agent's prompt.
        completions: `[agent][k]` token ids, the ending EOS included.
        advantages: `[agent][k]`; None for a completion whose joint responses were all dropped.
        zero_std: whether the group's returns were all equal, per agent.
    """

    turn: int
    version: int
    prompts: tuple[Ids, ...]
    completions: tuple[tuple[Ids, ...], ...]
    advantages: tuple[tuple[float | None, ...], ...]
    zero_std: tuple[bool, ...]

    def counted(self, agent: int) -> int:
        """Completions of an agent that count."""
        return sum(advantage is not None for advantage in self.advantages[agent])


class OfTurn(Protocol):
    """A sample of one turn, from a team that had made `version` optimizer steps."""

    @property
    def turn(self) -> int: ...

    @property
    def version(self) -> int: ...


Sample = TypeVar("Sample", bound=OfTurn)


class RolloutBuffer(Generic[Sample]):
    """Waits until `size` nodes are there, then gives them away in minibatches of `batch_size` nodes of one turn.

    Every node holds a sample of every agent, so the agents' buffers are always filled alike: one object stands for all.
    """

    def __init__(self, size: int, batch_size: int | None = None) -> None:
        self.size = size
        self.batch_size = batch_size or size
        self._waiting: list[Sample] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        """Nodes until it is full (0 or less: it is)."""
        return self.size - len(self._waiting)

    def add(self, sample: Sample) -> None:
        """Put one node in."""
        self._waiting.append(sample)

    def drain(self, prepare: Callable[[list[Sample]], list[Sample]] | None = None) -> list[list[Sample]]:
        """Empty the buffer: minibatches, the first turn's first, in the order in which the nodes came.

        `prepare` sees all of them before they are divided.
        """
        waiting, self._waiting = self._waiting, []
        if prepare is not None:
            waiting = prepare(waiting)
        return [
            [waiting[index] for index in batch]
            for batch in minibatches([sample.turn for sample in waiting], self.batch_size)
        ]


def minibatches(turns: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of nodes with these `turns`, in minibatches of at most `batch_size` that never mix turns."""
    batches = []
    for turn in sorted(set(turns)):
        indices = [index for index, other in enumerate(turns) if other == turn]
        batches += [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    return batches
