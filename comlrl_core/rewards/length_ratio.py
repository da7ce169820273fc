"""A two-agent reward to check by eye: the second text should be two to three times as long as the first."""

import math
from collections.abc import Sequence

from comlrl_core.errors import ConfigError


def length_ratio(
    completions_1: Sequence[str], completions_2: Sequence[str], *, low: float = 2.0, high: float = 3.0
) -> list[float]:
    """One reward per joint response: `exp(-d)`, `d` being the distance of the length ratio from [low, high].

    Lengths are in characters, the ratio is second over first. A joint response with an empty text earns 0.
    """
    if not 0 <= low <= high < math.inf:
        raise ConfigError(f"length_ratio: needs 0 <= low <= high, both finite; got low={low}, high={high}")
    return [_reward(first, second, low, high) for first, second in zip(completions_1, completions_2, strict=True)]


def _reward(first: str, second: str, low: float, high: float) -> float:
    if not first or not second:
        return 0.0
    ratio = len(second) / len(first)
    return math.exp(-max(0.0, low - ratio, ratio - high))


# Written through __dict__ because a type checker knows no attributes of functions.
length_ratio.__dict__["reward_range"] = (0.0, 1.0)
