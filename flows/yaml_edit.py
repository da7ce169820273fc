"""Edits of YAML files that leave every other byte as it is: comments, order, quotes and number formats.

Loading and dumping with a round-trip parser loses a comment with the entry that it happened to be attached
to, and re-indents lists. So the parser only says where a value stands, and the edit is made in the text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from comlrl_core.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")


def read(path: Path) -> str:
    """The text of a file with its line breaks as they are. Raises `ConfigError`."""
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def parse(text: str, path: Path) -> MappingNode:
    """The top-level mapping of `text`; `path` is for the message of the `ConfigError`."""
    try:
        node = YAML().compose(text)
    except YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(node, MappingNode):
        raise ConfigError(f"{path} must hold a mapping at its top")
    return node


def items(node: Node | None) -> Iterator[tuple[Node, Node]]:
    """Key and value nodes of a mapping; nothing for any other node."""
    if isinstance(node, MappingNode):
        yield from node.value


def get(node: Node | None, key: str) -> tuple[Node, Node] | None:
    """The key and value node of `key` in a mapping, or None."""
    for key_node, value in items(node):
        if isinstance(key_node, ScalarNode) and key_node.value == key:
            return key_node, value
    return None


def find_all(node: Node, key: str) -> list[tuple[Node, Node]]:
    """Key and value nodes of `key` anywhere in the mappings below `node`."""
    found: list[tuple[Node, Node]] = []
    for key_node, value in items(node):
        if isinstance(key_node, ScalarNode) and key_node.value == key:
            found.append((key_node, value))
        found += find_all(value, key)
    return found


def is_block(node: Node) -> bool:
    """True means: a mapping or list written over several lines, without brackets."""
    return isinstance(node, MappingNode | SequenceNode) and not node.flow_style and bool(node.value)


def start(node: Node) -> int:
    """Index of the first character of `node` in the text."""
    return int(node.start_mark.index)


def end(node: Node) -> int:
    """Index after the last character of `node`; a block ends with its last entry, before any comment after
    it.
    """
    if is_block(node):
        last: Any = node.value[-1]
        if isinstance(last, tuple):
            return end(last[1]) if not _nothing(last[1]) else int(last[0].end_mark.index) + 1
        return end(last)
    return int(node.end_mark.index)


def _nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index


def line_start(text: str, index: int) -> int:
    """Index of the first character of the line that holds `index`."""
    return text.rfind("\n", 0, index) + 1


def line_end(text: str, index: int) -> int:
    """Index after the line break of the line that holds `index` (or the end of the text)."""
    position = text.find("\n", index)
    return len(text) if position < 0 else position + 1


def insert_lines(text: str, position: int, lines: Sequence[str]) -> str:
    """Put whole lines at `position` (the start of a line or the end of the text), in the file's kind of line
    break.
    """
    if not lines:
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    before = text[:position]
    if before and not before.endswith("\n"):
        before += newline
    return before + "".join(line + newline for line in lines) + text[position:]


def cut_lines(text: str, first: Node, last: Node) -> str:
    """Remove the lines from the one where `first` starts to the one where `last` ends."""
    return text[: line_start(text, start(first))] + text[line_end(text, end(last)) :]


def replace_value(text: str, key: Node, value: Node, new: str) -> str:
    """Write `new` after `key:` instead of what stands there (a scalar, a bracketed collection, nothing)."""
    first, last = start(value), end(value)
    if first == last:  # the parser places a value that was not written at the next token
        first = last = text.index(":", end(key)) + 1
    head = text[:first].rstrip(" ")
    return f"{head} {new}{text[last:]}" if new else head + text[last:]


def scalar(value: str) -> str:
    """A string as YAML; plain where that is unambiguous. DVC's `${...}` is escaped."""
    value = value.replace("${", "\\${")
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def write(path: Path, text: str) -> None:
    """Replace the file in one step; the new text must be valid YAML."""
    try:
        YAML(typ="safe").load(text)
    except YAMLError as error:
        raise ConfigError(f"editing {path} would make it invalid: {error}") from error
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as stream:
        stream.write(text)
    temporary.chmod(path.stat().st_mode)
    temporary.replace(path)
