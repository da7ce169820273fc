"""Advantages by hand: baselines, normalisation, dropped entries, groups without a difference."""

import math

import pytest
import torch
from torch import Tensor

from comlrl_core.rl.advantages import AdvantageMode, group_advantages, zero_variance

MODES: list[AdvantageMode] = ["mean", "max", "rloo", "raw"]


def of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def everything(returns: Tensor) -> Tensor:
    return torch.ones_like(returns, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw", [1.0, 2.0, 6.0, 3.0]),
        # mean 12 / 4 = 3
        ("mean", [-2.0, -1.0, 3.0, 0.0]),
        # best 6
        ("max", [-5.0, -4.0, 0.0, -3.0]),
        # means of the others: 11/3, 10/3, 6/3, 9/3
        ("rloo", [-8 / 3, -4 / 3, 4.0, 0.0]),
    ],
)
def test_by_hand(mode: AdvantageMode, expected: list[float]) -> None:
    """Returns 1, 2, 6, 3."""
    returns = of([1.0, 2.0, 6.0, 3.0])
    found = group_advantages(returns, everything(returns), mode)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_is_the_mean_baseline_times_k_over_k_minus_1() -> None:
    returns = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, rloo = (group_advantages(returns, everything(returns), mode) for mode in ("mean", "rloo"))
    torch.testing.assert_close(rloo, mean * 4 / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_normalisation_by_hand_makes_the_four_identical(mode: AdvantageMode) -> None:
    """Returns 1, 2, 6, 3: centred -2, -1, 3, 0; population variance (4 + 1 + 9 + 0) / 4 = 3.5."""
    returns = of([1.0, 2.0, 6.0, 3.0])
    found = group_advantages(returns, everything(returns), mode, normalize=True)
    assert found[0].tolist() == pytest.approx([value / math.sqrt(3.5) for value in (-2, -1, 3, 0)], abs=1e-12)


def test_the_floor_of_the_standard_deviation() -> None:
    """Returns 1 and 1 + 2e-9 have a population standard deviation of 1e-9; it is taken for 1e-6: 1e-9 / 1e-6."""
    returns = of([0.0, 2e-9])
    found = group_advantages(returns, everything(returns), "mean", normalize=True)
    assert found[0].tolist() == pytest.approx([-1e-3, 1e-3], rel=1e-9)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_equal_rewards_gives_nan(mode: AdvantageMode, normalize: bool) -> None:
    """Pitfall 13: exactly zero (0.1 three times has a mean that is not 0.1), but for `raw` without normalisation."""
    returns = of([0.1, 0.1, 0.1], [0.0, 1.0, 0.5])
    found = group_advantages(returns, everything(returns), mode, normalize)
    expected = 0.1 if mode == "raw" and not normalize else 0.0
    assert found[0].tolist() == [expected] * 3
    assert bool(found.isfinite().all())
    assert zero_variance(returns, everything(returns)).tolist() == [True, False]


@pytest.mark.parametrize("bad", [math.nan, 1e9])
@pytest.mark.parametrize(
    ("mode", "normalize", "expected"),
    [
        ("mean", False, [-1.0, 0.0, 1.0]),
        ("rloo", False, [-2.0, 0.0, 2.0]),
        ("max", False, [-2.0, 0.0, 0.0]),
        ("raw", False, [1.0, 0.0, 3.0]),
        ("mean", True, [-1.0, 0.0, 1.0]),
    ],
)
def test_one_nan_reward_removes_a_whole_groups_update_silently(
    mode: AdvantageMode, normalize: bool, expected: list[float], bad: float
) -> None:
    """Pitfall 13: of 1, (dropped), 3 the mean is 2, the deviation 1, and each one's other is the other."""
    valid = torch.tensor([[True, False, True]])
    assert group_advantages(of([1.0, bad, 3.0]), valid, mode, normalize)[0].tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_one_or_none(mode: AdvantageMode) -> None:
    """One return has nothing to be compared with; of none there is nothing."""
    returns = of([5.0, math.nan], [math.nan, math.nan])
    valid = torch.tensor([[True, False], [False, False]])
    assert group_advantages(returns, valid, mode).tolist() == [[5.0 if mode == "raw" else 0.0, 0.0], [0.0, 0.0]]
    assert zero_variance(returns, valid).tolist() == [True, True]


def test_bad_arguments_are_refused() -> None:
    returns = of([1.0, 2.0])
    with pytest.raises(ValueError, match="mean, max, rloo, raw"):
        group_advantages(returns, everything(returns), "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[G, K\]"):
        group_advantages(returns, everything(returns[0]), "mean")
