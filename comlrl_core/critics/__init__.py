"""Critics: what a history, or a history with a response, is worth."""

from comlrl_core.critics.critic import Critic, SeparateCritic, SharedCritic, View
from comlrl_core.critics.critics import Critics

__all__ = ["Critic", "Critics", "SeparateCritic", "SharedCritic", "View"]
