"""Which pairs an iteration trains on: its own, or a draw from its own and those of earlier iterations.

Draws are first allotted to files, each on its own by weight (a multinomial, no quota). Inside a file they
come from a shuffled copy, without repetition until it is used up, then from a newly shuffled one. In the end
all are shuffled together. Of a file, only the pairs that are drawn are read (`offsets.py`).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.notices import say_once
from comlrl_core.preference.files import iteration_path, read_iteration
from comlrl_core.preference.offsets import open_pairs
from comlrl_core.preference.records import PairRecord
from comlrl_core.randomness import generator

MODES = ("current", "nearest_k", "all_history", "lambda_decay")


@dataclass(frozen=True)
class ReplaySettings:
    """`mode` (one of `MODES`), `k` for `nearest_k`, `lam` in [0, 1] for `lambda_decay`, and how much to draw.

    `sample_size` None draws as many as this iteration (or the newest one with pairs) has. Under `current`,
    which draws nothing, a sample size or `lam` has no effect, and this is said once. Raises `ConfigError` for
    what does not fit together.
    """

    mode: str = "current"
    k: int | None = None
    lam: float | None = None
    sample_size: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"preference_replay_mode: {self.mode!r} is unknown; allowed: {', '.join(MODES)}")
        _at_least_one("preference_replay_k", self.k)
        _at_least_one("preference_replay_sample_size", self.sample_size)
        lam = self.lam
        if lam is not None and (isinstance(lam, bool) or not isinstance(lam, int | float) or not 0 <= lam <= 1):
            raise ConfigError(f"preference_replay_lambda: must be a number from 0 to 1, got {lam!r}")
        if self.mode == "nearest_k" and self.k is None:
            raise ConfigError("preference_replay_k: preference_replay_mode nearest_k needs one (1 or more)")
        if self.mode == "lambda_decay" and lam is None:
            raise ConfigError("preference_replay_lambda: preference_replay_mode lambda_decay needs one (0 to 1)")
        if self.mode == "current" and self.k not in (None, 1):
            raise ConfigError(f"preference_replay_k: must be null or 1 under current, got {self.k}")
        if self.mode in ("all_history", "lambda_decay") and self.k is not None:
            raise ConfigError(f"preference_replay_k: belongs to nearest_k, not to {self.mode}; leave it null")
        if self.mode in ("nearest_k", "all_history") and lam is not None:
            raise ConfigError(f"preference_replay_lambda: belongs to lambda_decay, not to {self.mode}; leave it null")
        if self.mode == "current":
            for name, value in (("sample_size", self.sample_size), ("lambda", lam)):
                if value is not None:
                    say_once(
                        f"replay current {name}",
                        f"preference_replay_{name} has no effect under preference_replay_mode: current, "
                        "which trains on all pairs of the iteration",
                    )


class ReplaySample(NamedTuple):
    """The pairs to train on, in order, and how many of them come from each iteration's file (zeros too)."""

    records: list[PairRecord]
    counts: dict[int, int]


def replay_weights(sizes: dict[int, int], settings: ReplaySettings) -> dict[int, float]:
    """The probability of each file for one draw; `sizes` maps iterations to numbers of pairs.

    Files that cannot be drawn from (no pairs, too old for `nearest_k`) are left out.
    A file's age under `lambda_decay` is its place among the files with pairs, the newest having age 0.
    """
    filled = sorted((iteration for iteration, size in sizes.items() if size > 0), reverse=True)
    if settings.mode == "current":
        filled = [iteration for iteration in filled if iteration == max(sizes)]
    if settings.mode == "nearest_k":
        filled = filled[: settings.k]
    if settings.mode == "lambda_decay":
        decay = float(settings.lam or 0.0)
        raw = [decay**age for age in range(len(filled))]  # in Python 0.0**0 is 1.0
    else:
        raw = [1.0] * len(filled)
    total = math.fsum(raw)
    return {iteration: weight / total for iteration, weight in zip(filled, raw, strict=True)}


def sample_replay(
    folder: str | os.PathLike[str],
    iteration: int,
    eligible: Sequence[int],
    settings: ReplaySettings,
    stream: Sequence[int | str],
) -> ReplaySample:
    """The training pairs of `iteration`, whose file must be there already.

    `eligible` are the iterations of this run whose files may be drawn from (this one always may). `stream`
    names the random stream. Mode `current` gives all pairs of this iteration in file order. With no pair in
    any eligible file the sample is empty. Raises `DataError` naming the file for one that is missing, torn or
    foreign.
    """
    if settings.mode == "current":
        records = read_iteration(iteration_path(folder, iteration))
        return ReplaySample(records, {iteration: len(records)})
    files = sorted({*eligible, iteration})
    if files[-1] > iteration:
        raise DataError(f"replay: iteration {files[-1]} is later than {iteration} and cannot be drawn from")
    pairs = {number: open_pairs(iteration_path(folder, number)) for number in files}
    sizes = {number: len(of_file) for number, of_file in pairs.items()}
    weights = replay_weights(sizes, settings)
    if not weights:
        return ReplaySample([], dict.fromkeys(files, 0))
    draws = settings.sample_size or sizes[max(weights)]
    allotted = _allot(draws, weights, generator(*stream, "files"))
    drawn: list[PairRecord] = []
    for number, count in allotted.items():
        if count:
            drawn += pairs[number].take(_inside(sizes[number], count, generator(*stream, "file", number)))
    order = generator(*stream, "shuffle").permutation(len(drawn))
    return ReplaySample([drawn[position] for position in order], dict.fromkeys(files, 0) | allotted)


def _allot(draws: int, weights: dict[int, float], random: np.random.Generator) -> dict[int, int]:
    """How many of `draws` fall on each file, each draw on its own."""
    files = sorted(weights)
    edges = np.cumsum([weights[number] for number in files])
    # The last edge is exactly 1, so that no draw falls beyond; a file of weight 0 has no width and is never
    # hit.
    hits = np.searchsorted(edges / edges[-1], random.random(draws), side="right")
    return {number: int(count) for number, count in zip(files, np.bincount(hits, minlength=len(files)), strict=True)}


def _inside(size: int, count: int, random: np.random.Generator) -> list[int]:
    """`count` positions in a file of `size` pairs: one shuffled copy after the other."""
    positions: list[int] = []
    while len(positions) < count:
        positions += random.permutation(size)[: count - len(positions)].tolist()
    return positions


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name}: must be null or an integer of at least 1, got {value!r}")
