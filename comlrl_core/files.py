"""Files that are whole or absent, and JSON that means the same wherever it is read.

Every file is written aside in the same folder, flushed to disk and renamed, so a process that dies in the
middle leaves the old file as it was. JSON here is strict: no NaN or Infinity, no repeated key, UTF-8; a float
has its shortest exact form, so it comes back as the same float.
"""

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from comlrl_core.errors import DataError

READ_BLOCK_BYTES = 1 << 20
_STRING_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def atomic_open(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write; `path` gets its contents if the block ends without an error, else stays.

    Missing parent folders are made. The temporary file is a hidden sibling (`.<name>.<random>.tmp`).
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut (nothing to do outside POSIX)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` at once: a reader sees the old file or the new one, never a part."""
    with atomic_open(path) as file:
        file.write(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, line ends as given."""
    atomic_write_bytes(path, text.encode())


def dump_json(obj: Any, where: str, *, sort_keys: bool = False, indent: int | None = None) -> str:
    """`obj` as strict JSON text without a final newline; `where` names it in errors.

    Keys keep their order unless `sort_keys`. Raises `DataError` naming the field that JSON cannot hold (NaN,
    bytes ...).
    """
    try:
        text = json.dumps(obj, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, indent=indent)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: {_unwritable(obj) or error}") from error
    # Half of a surrogate pair has no UTF-8 form; escaped it is valid JSON and comes back as it was.
    return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def write_json(path: str | os.PathLike[str], obj: Any, *, sort_keys: bool = False, indent: int | None = 2) -> None:
    """Write `obj` to `path` atomically as strict JSON (see `dump_json`) with a final newline."""
    atomic_write_text(path, dump_json(obj, str(path), sort_keys=sort_keys, indent=indent) + "\n")


def parse_json(text: str, where: str, first_line: int = 1) -> Any:
    """The value of one strict JSON text; `where` and the line (counted from `first_line`) go into errors.

    Raises `DataError` for broken JSON, NaN, Infinity, a number too large for a float and a repeated key.
    """

    def constant(name: str) -> None:
        position = next((m.start() for m in _STRING_OR_CONSTANT.finditer(text) if m.group() == name), 0)
        raise DataError(f"{where}: {_position(text, position, first_line)}: {name} is not a JSON number")

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            line = _position(text, max(text.find(digits), 0), first_line)
            raise DataError(f"{where}: {line}: {digits} is too large for a float")
        return value

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            names = [name for name, _ in items]
            repeated = next(name for name in names if names.count(name) > 1)
            line = _position(text, max(text.find(json.dumps(repeated, ensure_ascii=False)), 0), first_line)
            raise DataError(f"{where}: {line}: the key {repeated!r} occurs more than once in one object")
        return result

    try:
        return json.loads(text, parse_constant=constant, parse_float=number, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        line = _position(text, error.pos, first_line)
        raise DataError(f"{where}: {line}: not valid JSON ({error.msg}); is the file whole?") from error
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a strict JSON file. Raises `DataError` naming file, line and column."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_json(_decode(data, str(path)), str(path))


def iter_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for each non-blank line of a JSONL file; one line in memory at a time.

    Raises `DataError` naming file and line for a line that is not a strict JSON object.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed by the block below; only opening is guarded here)
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        # Bytes split at \n alone; text would also split at characters that are legal inside a JSON string.
        for number, data in enumerate(file, start=1):
            line = _decode(data, f"{path}: line {number}").rstrip("\r\n")
            if not line.strip():
                continue
            value = parse_json(line, str(path), first_line=number)
            if not isinstance(value, dict):
                raise DataError(f"{path}: line {number}: expected a JSON object, found {type(value).__name__}")
            yield number, value


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All objects of a JSONL file, in file order (see `iter_jsonl`)."""
    return [value for _, value in iter_jsonl(path)]


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Any], *, sort_keys: bool = False) -> int:
    """Write one strict JSON value per line, atomically; returns how many. One bad row: nothing is written."""
    count = 0
    with atomic_open(path) as file:
        for count, row in enumerate(rows, start=1):
            file.write(dump_json(row, f"{path}: line {count}", sort_keys=sort_keys).encode() + b"\n")
    return count


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(READ_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _unreadable(path: str | os.PathLike[str], error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error})")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8") from error


def _position(text: str, offset: int, first_line: int) -> str:
    line = first_line + text.count("\n", 0, offset)
    return f"line {line} column {offset - text.rfind(chr(10), 0, offset)}"


def _unwritable(obj: Any, field: str = "") -> str | None:
    """What in `obj` JSON cannot hold, and where; None if the walk finds nothing."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                return f"field {field or '(top)'}: the key {key!r} is not a string"
            if found := _unwritable(value, f"{field}.{key}" if field else key):
                return found
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            if found := _unwritable(value, f"{field}[{index}]"):
                return found
    elif isinstance(obj, float) and not math.isfinite(obj):
        return f"field {field or '(top)'}: {obj} is not a JSON number"
    elif obj is not None and not isinstance(obj, str | int | float):
        return f"field {field or '(top)'}: a {type(obj).__name__} has no JSON form"
    return None
