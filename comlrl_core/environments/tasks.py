"""Task sets: rows from Python objects, files or data set names, each with an id that never changes."""

import csv
import datetime
import hashlib
import importlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import dump_json, iter_jsonl, write_jsonl

ID_DIGITS = 16
FILE_KINDS = (".jsonl", ".csv", ".parquet")
DEFAULT_SPLIT = "train"
BUILTIN_PREFIX = "builtin:"
# Name -> module with make_tasks(num_train, num_eval, seed).
TASK_SETS = {
    "length_ratio": "comlrl_core.environments.length_ratio",
    "writing_prompts": "comlrl_core.environments.writing_prompts",
}
_BRACKETS = re.compile(r"(?P<name>[^\[\]]+)\[(?P<part>.+)\]")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What a folder may hold for `datasets.load_dataset`; and what names a file, so that a missing one is no data-set name.
_DATA_SUFFIXES = (*FILE_KINDS, ".json", ".arrow", ".txt", ".gz", ".zst", ".zip", ".tar")
_OTHER_SUFFIXES = (".json", ".txt", ".tsv", ".xlsx", ".yaml", ".yml", ".md", ".gz", ".zip", ".ndjson", ".py")
_RANGE = re.compile(r"(?P<start>-?\d*):(?P<stop>-?\d*)")

TaskSource = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


def load_tasks(source: TaskSource, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a task set, at most `limit`, each with a `task_id`.

    `source` is a list of dicts, a `datasets.Dataset` or `IterableDataset` (read only as far as `limit`; an
    endless one needs a limit, it would never end otherwise), a `.jsonl`, `.csv` or `.parquet` file, or a name
    or folder for `datasets.load_dataset`. A name may end in a split, `name[test]`, or a part of one,
    `name[train[:256]]`; `[:256]` alone means the split `train` (and works for files).

    A row's own `task_id` is kept (a number as its text) and must occur once. A row without one is named by a
    digest of its contents, and its later copies by that digest and a number. Rows must hold what JSON can:
    NumPy values become plain ones, dates their ISO form. Raises `DataError` naming the source and the row
    (files: the line).
    """
    return [row for _, row in locate_tasks(source, limit)]


def locate_tasks(source: TaskSource, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """The rows of `load_tasks`, each with where it stands: `tasks.jsonl: line 3`."""
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise DataError(f"tasks: the limit must be null or at least 1, got {limit}")
    if isinstance(source, str | os.PathLike):
        name, located = str(source), _from_name(str(source))
    else:
        name, located = f"tasks ({type(source).__name__})", _from_object(source)
    rows = list(_plain_rows(islice(located, limit)))
    if not rows:
        raise DataError(f"{name}: there are no tasks in it")
    return _with_ids(rows)


def make_builtin_tasks(
    name: str, num_train: int | None, num_eval: int | None, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train rows, evaluation rows) of the built-in set `name` (with or without `builtin:`), none in both.

    None as a number takes that set's default. Raises `ConfigError` for an unknown name or more tasks than
    there are.
    """
    module = TASK_SETS.get(name.removeprefix(BUILTIN_PREFIX))
    if module is None:
        allowed = ", ".join(BUILTIN_PREFIX + known for known in TASK_SETS)
        raise ConfigError(f"tasks: there is no built-in task set {name!r}; allowed: {allowed}")
    counts = {"num_train": num_train, "num_eval": num_eval}
    given = {key: count for key, count in counts.items() if count is not None}
    train, held_out = importlib.import_module(module).make_tasks(**given, seed=seed)
    return train, held_out


def write_tasks(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows with a `task_id` each as JSONL, atomically; `DataError` for an id missing or given twice."""
    listed = [dict(row) for row in rows]
    _check_ids((f"{path}: line {number}", row) for number, row in enumerate(listed, start=1))
    write_jsonl(path, listed)
    return Path(path)


def read_tasks(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a file that `write_tasks` wrote (maybe none). Raises `DataError` naming file and line."""
    located = [(f"{path}: line {number}", row) for number, row in iter_jsonl(path)]
    _check_ids(located)
    return [row for _, row in located]


def _from_object(source: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(source, Mapping):  # a DatasetDict, or one row
        raise DataError(f"tasks: expected rows, found a mapping with {', '.join(map(str, source))}; choose one split")
    if not isinstance(source, Iterable):
        raise DataError(f"tasks: expected rows, a file or a data set name, found {type(source).__name__}")
    for index, row in enumerate(source):
        if not isinstance(row, Mapping):
            raise DataError(f"tasks: row {index}: expected a mapping of fields, found {type(row).__name__}")
        yield f"tasks: row {index}", row


def needs_datasets(source: str) -> bool:
    """Whether only `datasets.load_dataset` can read `source`: a name on the hub or a folder, no built-in set, no file.

    Raises `DataError` for what is neither: a file of another kind, a path to nothing, a folder without data files.
    """
    if source.startswith(BUILTIN_PREFIX):
        return False
    base, _ = _parts(source)
    path = Path(base)
    kinds = ", ".join(FILE_KINDS)
    if path.suffix in FILE_KINDS:
        return False
    if path.is_dir():
        if not any(file.suffix in _DATA_SUFFIXES for file in path.rglob("*")):
            raise DataError(f"{base}: a folder without data files; allowed: a file of {kinds}, or a data-set name")
        return True
    if path.is_file():
        raise DataError(f"{base}: {path.suffix or 'no suffix'} is no kind of task file; allowed: {kinds}")
    if base.startswith((".", "/", "~")) or base.count("/") > 1 or path.suffix in _OTHER_SUFFIXES:
        raise DataError(f"{base}: there is no such task file; allowed: a file of {kinds}, or a data-set name")
    if not _HUB_NAME.fullmatch(base):
        raise DataError(f"{base!r} is neither a file of {kinds} nor the name of a data set")
    return True


def _parts(name: str) -> tuple[str, str]:
    """`name[part]` as (name, part); the part is empty where there is none."""
    match = _BRACKETS.fullmatch(name)
    return (match["name"], match["part"]) if match and not Path(name).exists() else (name, "")


def _from_name(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if name.startswith(BUILTIN_PREFIX):
        raise DataError(f"{name}: a built-in task set is made, not loaded (make_builtin_tasks)")
    base, part = _parts(name)
    if not needs_datasets(name):
        return _slice_rows(_from_file(Path(base)), part, name)
    return _from_hub(base, f"{DEFAULT_SPLIT}[{part}]" if _RANGE.fullmatch(part) else part or DEFAULT_SPLIT)


def _slice_rows(
    rows: Iterator[tuple[str, Mapping[str, Any]]], part: str, name: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not part:
        return rows
    match = _RANGE.fullmatch(part)
    if not match:
        raise DataError(f"{name}: a file has no splits; allowed after its name: [start:stop]")
    start, stop = (int(match[key]) if match[key] not in ("", "-") else None for key in ("start", "stop"))
    return iter(list(rows)[start:stop])


def _from_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such task file")
    if path.suffix == ".jsonl":
        return ((f"{path}: line {number}", row) for number, row in iter_jsonl(path))
    return _from_csv(path) if path.suffix == ".csv" else _from_parquet(path)


def _from_csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            if len(set(names)) < len(names) or not all(names):
                raise DataError(f"{path}: line 1: expected distinct column names, found {names}")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{path}: line {reader.line_num}: {len(cells)} values for the {len(names)} columns "
                        f"{', '.join(names)}"
                    )
                yield f"{path}: line {reader.line_num}", dict(zip(names, cells, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a whole CSV file in UTF-8 ({error})") from error


def _from_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})") from error
    return ((f"{path}: row {index}", row) for index, row in enumerate(rows))


def _from_hub(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets  # here: it takes seconds, and most task sets do without

    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub, the network, the folder's own files: each with its own class
        raise DataError(
            f"{name}: is no task file ({', '.join(FILE_KINDS)}), and datasets.load_dataset with split "
            f"{split!r} raised {type(error).__name__}: {error}"
        ) from error
    return ((f"{name}[{split}]: row {index}", row) for index, row in enumerate(loaded))


def _plain_rows(located: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in located:
        plain = {}
        for key, value in row.items():
            if not isinstance(key, str):
                raise DataError(f"{where}: the field name {key!r} is not a string")
            plain[key] = _plain(value, f"{where}: field {key!r}")
        yield where, plain


def _plain(value: Any, where: str) -> Any:
    """`value` in JSON's own types."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where}: {value} is not a number that JSON holds; leave it out or write null")
        return float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{where}: the name {key!r} is not a string")
        return {key: _plain(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, where) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # NumPy and PyTorch values, scalars too
        return _plain(value.tolist(), where)
    raise DataError(f"{where}: a {type(value).__name__} cannot be kept in a task file")


def _with_ids(located: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    copies: dict[str, int] = {}
    named: list[tuple[str, dict[str, Any]]] = []
    for where, row in located:
        given = row.get("task_id")
        if given is None:
            contents = {key: value for key, value in row.items() if key != "task_id"}
            digest = hashlib.sha256(dump_json(contents, where, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
            copies[digest] = copies.get(digest, 0) + 1
            task_id = digest if copies[digest] == 1 else f"{digest}-{copies[digest]}"
        else:
            task_id = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
        named.append((where, {**row, "task_id": task_id}))
    _check_ids(named)
    return named


def _check_ids(located: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    seen: dict[str, str] = {}
    for where, row in located:
        task_id = row.get("task_id")
        if not isinstance(task_id, str) or not task_id:
            raise DataError(f"{where}: field 'task_id': expected a string that is not empty, found {task_id!r}")
        if task_id in seen:
            raise DataError(f"{where}: task_id {task_id!r} was given before ({seen[task_id]})")
        seen[task_id] = where
