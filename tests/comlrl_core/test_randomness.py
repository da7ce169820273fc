"""Streams are named by what is drawn: the same name, the same numbers."""

from hashlib import blake2b

import numpy as np
import pytest

from comlrl_core.randomness import generator, stream_key, torch_seed, uniforms


def test_a_key_is_the_hash_of_typed_and_measured_parts() -> None:
    """Written out for ("a", 1): length, type and value of each part. Another rule would change every run."""
    digest = blake2b(digest_size=16)
    for text in (b"str:a", b"int:1"):
        digest.update(len(text).to_bytes(4, "big") + text)
    assert stream_key("a", 1) == int.from_bytes(digest.digest(), "big")
    assert 0 <= stream_key("a", 1) < 2**128


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        ((1,), ("1",)),
        ((1, 2), (2, 1)),
        ((1,), (1, 0)),
        ((), ("",)),
        ((12, 3), (1, 23)),
    ],
)
def test_different_names_are_different_streams(one: tuple, other: tuple) -> None:
    assert stream_key(*one) != stream_key(*other)
    assert generator(*one).random() != generator(*other).random()


def test_the_same_name_draws_the_same_numbers_and_moves_no_other_stream() -> None:
    first = generator("x", 1)
    expected = generator("x", 1).random(4)
    generator("y", 1).random(100)
    np.random.seed(0)
    assert np.array_equal(first.random(4), expected)


def test_numbers_of_a_sample_do_not_depend_on_its_neighbours() -> None:
    keys = [stream_key("s", i) for i in range(5)]
    together = uniforms(keys, 8)
    assert together.shape == (5, 8) and together.dtype == np.float64
    assert (together >= 0).all() and (together < 1).all()
    for i, key in enumerate(keys):
        assert np.array_equal(uniforms([key], 8)[0], together[i])
        assert np.array_equal(uniforms([key], 3)[0], together[i, :3])  # a longer draw begins with the shorter
    assert uniforms([], 8).shape == (0, 8)


def test_the_numbers_are_spread_evenly() -> None:
    """The mean of 20,000 has a standard error of 0.29 / 141 = 0.002."""
    drawn = uniforms([stream_key("even", i) for i in range(200)], 100)
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.04


def test_a_torch_seed_fits_its_range() -> None:
    seeds = [torch_seed("seed", i) for i in range(100)]
    assert len(set(seeds)) == 100 and all(0 <= seed < 2**63 for seed in seeds)
