"""The warning that a team has fallen below the best that it has been."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Measured:
    """One evaluation of a run: when it was, the mean reward, and the standard error of that."""

    when: str
    reward: float
    standard_error: float


def collapse_warning(curve: Sequence[Measured]) -> str | None:
    """A sentence where the newest evaluation lies more than two standard errors under the best one before it."""
    if len(curve) < 2:
        return None
    last = curve[-1]
    best = max(curve[:-1], key=lambda one: one.reward)
    error = math.hypot(best.standard_error, last.standard_error)
    if not last.reward < best.reward - STANDARD_ERRORS * error:
        return None
    return (
        f"the evaluation reward fell to {last.reward:.3f} from {best.reward:.3f} ({best.when}). What holds a team near "
        "its best: a smaller agent_learning_rate; with preferences a larger dpo_beta, a larger min_reward_gap, or "
        "reference: initial or previous; with rewards reference_kl_enabled"
    )
