"""Iteration files: `iteration_0001.json` with its pairs, `iteration_0001.meta.json` about their making.

    {"iteration": 1, "num_pairs": 2, "pairs": [...]}

Pairs are validated on writing and on reading. A file is whole or absent; no pair is skipped in silence. No
pairs at all is a valid file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comlrl_core.errors import DataError
from comlrl_core.files import atomic_write_text, dump_json, read_json, sha256_file, write_json
from comlrl_core.preference import fields
from comlrl_core.preference.records import PairRecord, from_json, to_json

_NAME = re.compile(r"iteration_(\d{4,})\.json")
_KEYS = ("iteration", "num_pairs", "pairs")
_META_KEYS = ("iteration", "num_pairs", "pairs_sha256")


def iteration_path(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Where iteration `iteration` (from 1) keeps its pairs."""
    return Path(folder) / f"iteration_{iteration:04d}.json"


def meta_path(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Where iteration `iteration` keeps what is known about its pairs."""
    return Path(folder) / f"iteration_{iteration:04d}.meta.json"


def list_iterations(folder: str | os.PathLike[str]) -> list[int]:
    """The numbers of the iteration files in a folder, ascending; empty if there is no such folder."""
    path = Path(folder)
    names = (entry.name for entry in path.iterdir()) if path.is_dir() else ()
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match.group(1)) for match in matches if match)


def write_iteration(
    folder: str | os.PathLike[str], iteration: int, records: Sequence[PairRecord], meta: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write an iteration's pairs, then its meta file; returns both paths. Same input, same bytes.

    The meta file holds `meta` and, added here, `iteration`, `num_pairs` and `pairs_sha256` (the digest of the
    pairs file). Raises `DataError` naming file, record and field, before anything is written.
    """
    if isinstance(iteration, bool) or iteration < 1:
        raise DataError(f"iteration {iteration}: iterations are counted from 1")
    if taken := set(_META_KEYS) & meta.keys():
        raise ValueError(f"meta may not hold {sorted(taken)}: they are filled in")
    path, beside = iteration_path(folder, iteration), meta_path(folder, iteration)
    lines = []
    for number, record in enumerate(records):
        where = f"{path}: record {number}"
        lines.append(dump_json(to_json(record, where), where))
    # One record per line: a person can read it, and a diff shows records.
    body = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    dump_json(dict(meta), str(beside))
    # A meta file that describes other pairs must not outlive them.
    beside.unlink(missing_ok=True)
    atomic_write_text(path, f'{{"iteration": {iteration}, "num_pairs": {len(lines)}, "pairs": {body}}}\n')
    head = {"iteration": iteration, "num_pairs": len(lines), "pairs_sha256": sha256_file(path)}
    write_json(beside, {**head, **meta})
    return path, beside


def read_iteration(path: str | os.PathLike[str]) -> list[PairRecord]:
    """The pairs of an iteration file, ours or one of the published format, in file order.

    Raises `DataError` naming file, record (from 0) and field: for a torn file, one whose count or number
    (where its name gives one) is wrong, and one with a bad record.
    """
    value = read_json(path)
    where = str(path)
    fields.exact_keys(value, _KEYS, (), where)
    iteration = fields.integer(value, "iteration", where, minimum=0)
    match = _NAME.fullmatch(Path(path).name)
    if match and int(match.group(1)) != iteration:
        raise DataError(f"{where}: field 'iteration': {iteration} contradicts the file's name")
    count = fields.integer(value, "num_pairs", where, minimum=0)
    pairs = value["pairs"]
    if not isinstance(pairs, list):
        raise DataError(f"{where}: field 'pairs': expected a list, found {fields.shown(pairs)}")
    if len(pairs) != count:
        raise DataError(f"{where}: field 'num_pairs': says {count}, but there are {len(pairs)} pairs")
    return [from_json(pair, f"{where}: record {number}") for number, pair in enumerate(pairs)]


def read_meta(folder: str | os.PathLike[str], iteration: int) -> dict[str, Any]:
    """What was written beside an iteration's pairs. Raises `DataError` if it describes other pairs."""
    path, pairs = meta_path(folder, iteration), iteration_path(folder, iteration)
    value = read_json(path)
    if not isinstance(value, dict) or any(key not in value for key in _META_KEYS):
        raise DataError(f"{path}: expected an object with {', '.join(_META_KEYS)}")
    if value["pairs_sha256"] != sha256_file(pairs):
        raise DataError(f"{path}: field 'pairs_sha256': {pairs.name} was changed after it was written")
    return value
