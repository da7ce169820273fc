"""Reading the pairs that `sample` drew."""

from pathlib import Path

from comlrl_core.files import iter_jsonl
from comlrl_core.preference.records import PairRecord, from_json


def read_records(path: Path) -> list[PairRecord]:
    """The drawn pairs, in training order; a `DataError` names file, line and field of a damaged one."""
    return [from_json(value, f"{path}: line {number}") for number, value in iter_jsonl(path)]
