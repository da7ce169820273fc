"""Random streams that depend on what is drawn, not on when or with whom it is drawn.

A stream is named by its parts (seed, iteration, stage, task, agent, candidate ...). Its key is a hash of those parts
and seeds a counter-based generator, so a sample draws the same numbers alone, in a batch of any size or on another
process, and drawing from one stream never moves another.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def stream_key(*parts: int | str) -> int:
    """The 128-bit key of the stream named by `parts`.

    Every part is written with its type and length, so `("a", "bc")` and `("ab", "c")`, or `1` and `"1"`, differ.
    """
    digest = blake2b(digest_size=16)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest(), "big")


def generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator (Philox) for the stream named by `parts`."""
    return np.random.Generator(np.random.Philox(key=stream_key(*parts)))


def torch_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) for libraries that only take an integer."""
    return stream_key(*parts) >> 65


def uniforms(keys: Sequence[int], count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) per key: float64 `[len(keys), count]`."""
    rows = np.empty((len(keys), count), dtype=np.float64)
    for row, key in zip(rows, keys, strict=True):
        np.random.Generator(np.random.Philox(key=key)).random(out=row)
    return rows
