"""How a refused setting is explained."""

import math

import pytest
from pydantic import Field, ValidationError

from comlrl_core.config.base import Settings, validate
from comlrl_core.errors import ConfigError


class Inner(Settings):
    rate: float = Field(0.5, ge=0.0, le=1.0)


class Outer(Settings):
    inner: Inner = Field(default_factory=Inner)
    maybe: Inner | None = None
    count: int = 1


def message(values: dict) -> str:
    with pytest.raises(ConfigError) as refused:
        validate(Outer, values, "file.yaml")
    return str(refused.value)


def test_a_line_says_where_what_and_what_was_given() -> None:
    assert message({"inner": {"rate": 2}}) == ("file.yaml: inner.rate: Input should be less than or equal to 1 (got 2)")


def test_unknown_names_get_a_suggestion_where_one_is_near() -> None:
    assert message({"inner": {"rat": 1}}) == "file.yaml: inner.rat: unknown setting; did you mean 'rate'?"
    assert message({"maybe": {"ratee": 1}}).endswith("did you mean 'rate'?")
    assert message({"zzz": 1}) == "file.yaml: zzz: unknown setting; known are count, inner, maybe"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_no_setting(value: float) -> None:
    assert "finite number" in message({"inner": {"rate": value}})
    settings = Inner()
    with pytest.raises(ValidationError):
        settings.rate = value


def test_long_values_are_cut_and_mappings_not_shown() -> None:
    assert len(message({"count": "9" * 4000 + "x"})) < 400
    assert message({"count": {"token": "secret"}}).endswith("(got a dict)")
