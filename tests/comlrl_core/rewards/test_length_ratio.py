"""The length-ratio reward, by hand."""

import math

import pytest

from comlrl_core.errors import ConfigError
from comlrl_core.rewards.length_ratio import length_ratio


def test_distance_from_the_interval_decides() -> None:
    """Against 4 characters: 8, 10, 12 are ratios 2, 2.5, 3, distance 0; 4 is 1 away, 20 is 2 away."""
    rewards = length_ratio(["abcd"] * 5, ["x" * n for n in (8, 10, 12, 4, 20)])
    assert rewards == pytest.approx([1.0, 1.0, 1.0, math.exp(-1), math.exp(-2)], abs=1e-15)


def test_empty_texts_earn_nothing_and_characters_count() -> None:
    """`éé` are two characters (four bytes): against `a` the ratio is 2."""
    assert length_ratio(["", "a", "", "a"], ["abc", "", "", "éé"]) == [0.0, 0.0, 0.0, 1.0]


def test_other_bounds() -> None:
    """Ratio 1 with bounds 0.5 to 1.5: distance 0."""
    assert length_ratio(["ab"], ["cd"], low=0.5, high=1.5) == [1.0]
    with pytest.raises(ConfigError, match="low <= high"):
        length_ratio(["ab"], ["cd"], low=3.0, high=2.0)


def test_range_is_declared() -> None:
    assert length_ratio.reward_range == (0.0, 1.0)  # type: ignore[attr-defined]
