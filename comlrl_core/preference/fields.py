"""Checks of single fields of a JSON object; each error names the place, the field, and what is allowed."""

import math
from collections.abc import Collection
from typing import Any

from comlrl_core.errors import DataError

SHOWN_CHARACTERS = 60


def shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def exact_keys(value: Any, required: Collection[str], optional: Collection[str], where: str) -> None:
    """`value` is an object with all `required` keys and none beyond those and the `optional` ones."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, found {shown(value)}")
    for key in required:
        if key not in value:
            raise DataError(f"{where}: field {key!r} is missing")
    for key in value:
        if key not in required and key not in optional:
            raise DataError(f"{where}: field {key!r} is unknown; allowed: {', '.join([*required, *optional])}")


def string(value: dict[str, Any], key: str, where: str, empty: bool = False) -> str:
    """A string, not an empty one unless `empty`."""
    found = value[key]
    if not isinstance(found, str) or (not found and not empty):
        what = "a string" if empty else "a string that is not empty"
        raise DataError(f"{where}: field {key!r}: expected {what}, found {shown(found)}")
    return found


def strings(value: dict[str, Any], key: str, where: str, length: int | None = None) -> tuple[str, ...]:
    """A list of strings, one per agent: `length` of them, or at least one."""
    found = value[key]
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise DataError(f"{where}: field {key!r}: expected a list of strings, found {shown(found)}")
    per_agent(found, key, where, length)
    return tuple(found)


def per_agent(found: list[Any], key: str, where: str, length: int | None) -> None:
    """`found` has one entry per agent."""
    if not found or (length is not None and len(found) != length):
        count = "at least one" if length is None else str(length)
        raise DataError(f"{where}: field {key!r}: expected {count} (one per agent), found {len(found)}")


def boolean(value: dict[str, Any], key: str, where: str) -> bool:
    """true or false."""
    found = value[key]
    if not isinstance(found, bool):
        raise DataError(f"{where}: field {key!r}: expected true or false, found {shown(found)}")
    return found


def integer(value: dict[str, Any], key: str, where: str, minimum: int) -> int:
    """An integer of at least `minimum`."""
    found = value[key]
    if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
        raise DataError(f"{where}: field {key!r}: expected an integer >= {minimum}, found {shown(found)}")
    return found


def number(value: dict[str, Any], key: str, where: str) -> float:
    """A finite number."""
    return finite(value[key], key, where)


def optional_number(value: dict[str, Any], key: str, where: str) -> float | None:
    """A finite number, or None."""
    return None if value[key] is None else finite(value[key], key, where)


def finite(found: Any, key: str, where: str) -> float:
    """`found` as a float. Refused: booleans, strings, NaN, infinities, integers too large for a float."""
    try:
        if not isinstance(found, bool) and isinstance(found, int | float) and math.isfinite(found):
            return float(found)
    except OverflowError:
        pass
    raise DataError(f"{where}: field {key!r}: expected a finite number, found {shown(found)}")


def token_ids(found: Any, where: str, key: str) -> tuple[int, ...]:
    """A list of token ids: at least one, each an integer of at least 0."""
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: field {key!r}: expected a list of token ids, found {shown(found)}")
    for item in found:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise DataError(f"{where}: field {key!r}: expected token ids (integers >= 0), found {shown(item)}")
    return tuple(found)
