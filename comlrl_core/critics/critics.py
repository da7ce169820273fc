"""The critics of a team: one that sees all agents, or one per agent that sees its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from comlrl_core.critics.critic import Critic
from comlrl_core.engine.protocol import Engine
from comlrl_core.errors import ConfigError

CriticType = Literal["v", "q"]


@dataclass(frozen=True)
class Critics:
    """Who says what a history is worth.

    Attributes:
        critics: one for all agents (`central`), or one per agent.
        central: whether there is one, on the joint history.
        num_agents: of the team.
    """

    critics: tuple[Critic, ...]
    central: bool
    num_agents: int

    def __post_init__(self) -> None:
        needed = 1 if self.central else self.num_agents
        if len(self.critics) != needed:
            raise ConfigError(f"{len(self.critics)} critics; {needed} needed for {self.num_agents} agents")

    @property
    def engines(self) -> list[Engine]:
        """One per critic, of its own parameters."""
        return [critic.engine for critic in self.critics]

    def index_of(self, agent: int) -> int:
        """Which critic speaks about an agent."""
        return 0 if self.central else agent

    def sees(self, index: int) -> Sequence[int]:
        """The agents whose histories a critic reads."""
        return range(self.num_agents) if self.central else (index,)
