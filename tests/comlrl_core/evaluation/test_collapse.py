import pytest

from comlrl_core.evaluation.collapse import Measured, collapse_warning


@pytest.mark.parametrize(("last", "warned"), [(0.75, False), (0.8, False), (0.7, True)])
def test_a_fall_beyond_two_standard_errors_is_said(last: float, warned: bool) -> None:
    """sqrt(0.03^2 + 0.04^2) = 0.05: from 0.85 the line is at 0.75."""
    curve = [Measured("one", 0.4, 0.03), Measured("two", 0.85, 0.03), Measured("three", last + 1e-9, 0.04)]
    warning = collapse_warning(curve)
    assert (warning is not None) == warned
    if warning:
        assert "0.850 (two)" in warning and "dpo_beta" in warning
    assert collapse_warning(curve[:1]) is None and collapse_warning([]) is None
