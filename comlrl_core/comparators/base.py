"""What a collection needs to know about the other side."""

from dataclasses import dataclass, field

from comlrl_core.team.team import Team


@dataclass
class Comparator:
    """A team that answers the same tasks as the one in training.

    Attributes:
        policy: the `comparator_policy` that it stands for; recorded as the source of its answers.
        team: the answering team. Frozen teams hold neither gradients nor an optimizer.
        version: what exactly answered (`iteration_0003`, a model name), for the record.
        owned: True means the team was made for this collection and is let go when it ends.
    """

    policy: str
    team: Team | None
    version: str
    owned: bool = field(default=True)

    def release(self) -> None:
        """Let go of a team that was made for this collection, and of its memory."""
        if self.owned:
            self.team = None
