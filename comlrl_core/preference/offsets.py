"""Where each pair of an iteration file begins, so that a draw reads the pairs that it takes and no others.

The offsets of `replay/iteration_0001.json` lie in `replay/.offsets/iteration_0001.npy`, made when the file is first
drawn from; making them validates every pair. They belong to one file of one size and time of change, and are made anew
for another. Files that do not hold one pair per line (written by other tools) have none and are read whole.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from comlrl_core.errors import DataError
from comlrl_core.files import atomic_open, parse_json
from comlrl_core.preference.files import read_iteration
from comlrl_core.preference.records import PairRecord, from_json
from comlrl_core.progress import progress

FOLDER = ".offsets"
_HEAD = re.compile(rb'\{"iteration": (\d+), "num_pairs": (\d+), "pairs": \[\n')
_END = b"]}\n"
_MARK = 2  # the first two numbers of an offsets file: size and time of change of the file that it describes


@dataclass(frozen=True)
class Pairs:
    """The pairs of one iteration file, read on demand. `offsets` has one entry more than there are pairs."""

    path: Path
    offsets: np.ndarray | None
    whole: list[PairRecord] | None

    def __len__(self) -> int:
        return len(self.whole) if self.whole is not None else len(self.offsets) - 1  # type: ignore[arg-type]

    def take(self, positions: Sequence[int]) -> list[PairRecord]:
        """The pairs at `positions`, in that order; each is validated as it is read."""
        if self.whole is not None:
            return [self.whole[position] for position in positions]
        assert self.offsets is not None
        with self.path.open("rb") as file:
            return [self._read(file, position) for position in positions]

    def _read(self, file: BinaryIO, position: int) -> PairRecord:
        assert self.offsets is not None
        begin, end = int(self.offsets[position]), int(self.offsets[position + 1])
        file.seek(begin)
        return _parse(file.read(end - begin), f"{self.path}: record {position}")


def open_pairs(path: str | os.PathLike[str]) -> Pairs:
    """The pairs of an iteration file. Raises `DataError` as `read_iteration` does, when a file is first opened."""
    source = Path(path)
    try:
        mark = _mark(source)
    except OSError:
        return Pairs(source, None, read_iteration(source))  # says what is wrong
    kept = source.parent / FOLDER / f"{source.stem}.npy"
    offsets = _load(kept, mark)
    if offsets is None:
        offsets = _find(source)
        if offsets is None:
            return Pairs(source, None, read_iteration(source))
        with atomic_open(kept) as file:
            np.save(file, np.concatenate([mark, offsets]))
    return Pairs(source, offsets, None)


def _mark(path: Path) -> np.ndarray:
    status = path.stat()
    return np.array([status.st_size, status.st_mtime_ns], dtype=np.int64)


def _load(kept: Path, mark: np.ndarray) -> np.ndarray | None:
    try:
        stored = np.load(kept, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if (
        stored.dtype != np.int64
        or stored.ndim != 1
        or len(stored) < _MARK + 1
        or not np.array_equal(stored[:_MARK], mark)
    ):
        return None
    return stored[_MARK:]


def _find(path: Path) -> np.ndarray | None:
    """Offsets of every pair and of the end, each pair validated; None for a file that is laid out in another way."""
    with path.open("rb") as file:
        head = file.readline()
        match = _HEAD.fullmatch(head)
        if match is None:
            return None
        offsets = [len(head)]
        with progress(f"Indexing {path.name}", int(match.group(2)), "pair") as bar:
            for line in file:
                if line == _END:
                    break
                _parse(line, f"{path}: record {len(offsets) - 1}")
                offsets.append(offsets[-1] + len(line))
                bar.update(1)
            else:
                return None  # torn: the reader of whole files says where
        if file.read(1):
            return None
    if int(match.group(2)) != len(offsets) - 1:
        return None
    name = re.fullmatch(r"iteration_(\d{4,})", path.stem)
    if name and int(name.group(1)) != int(match.group(1)):
        return None
    return np.array(offsets, dtype=np.int64)


def _parse(line: bytes, where: str) -> PairRecord:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason})") from None
    return from_json(parse_json(text.rstrip("\n").removesuffix(","), where), where)
