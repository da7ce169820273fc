"""Equal settings have equal digests."""

import hashlib

import pytest

from comlrl_core.digests import digest_values


def test_a_digest_is_that_of_compact_sorted_json() -> None:
    assert digest_values("a", {"y": 1, "x": None}) == hashlib.sha256(b'["a",{"x":null,"y":1}]').hexdigest()


def test_the_order_of_keys_and_the_kind_of_sequence_do_not_matter() -> None:
    assert digest_values({"a": 1, "b": [1, 2]}) == digest_values({"b": (1, 2), "a": 1})


@pytest.mark.parametrize(
    ("one", "other"), [((1,), ("1",)), ((1, 2), ([1, 2],)), ((None,), ("None",)), (({"a": 1},), ({"a": 2},))]
)
def test_other_values_have_other_digests(one: tuple, other: tuple) -> None:
    assert digest_values(*one) != digest_values(*other)
