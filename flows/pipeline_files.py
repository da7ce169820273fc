"""Edits that keep `params.yaml` and `dvc.yaml` in step with the settings; comments and all other text
stay.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from comlrl_core.config.run import FROM_REWARDS, iteration_key
from comlrl_core.errors import ConfigError
from flows import yaml_edit as ye

MAX_ITERATIONS = 9999  # four digits in iteration_0001.json and iterate@0001
USER_FILE_STAGES = ("prepare", "iterate", "evaluate")
MARK = "# from params.yaml"
"""Ends the lines of `dvc.yaml` that `sync_dependencies` owns; other lines are never touched."""

Files = Sequence[str | Path] | Mapping[str, Sequence[str | Path]]
"""The same files for `USER_FILE_STAGES`, or per stage."""


def set_iterations(params_path: Path, n: int) -> bool:
    """Make `params.yaml` ask for `n` iterations (1 to 9999); True if the file changed.

    Sets `num_iterations` (in whatever section it stands), `last_iteration: '0006'` and the mapping
    `iterations` (`'0001': {previous: '0000'}` ...), which DVC needs spelt out; for algorithms that learn from
    rewards the mapping is `epochs`, and `iterations` is emptied. Entries that are right stay as they are
    written. Raises `ConfigError`.
    """
    path = Path(params_path)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_ITERATIONS:
        raise ConfigError(f"the number of iterations must be a whole number from 1 to {MAX_ITERATIONS}, not {n!r}")
    original = ye.read(path)
    text = _set_scalar(path, original, "num_iterations", str(n))
    text = _set_scalar(path, text, "last_iteration", f"'{iteration_key(n)}'")
    used, unused = "iterations", "epochs"
    algorithm = ye.get(ye.parse(text, path), "algorithm")
    if algorithm is not None and algorithm[1].value in FROM_REWARDS:
        used, unused = unused, used
    text = _set_mapping(path, text, used, n)
    text = _empty_mapping(path, text, unused)
    if text == original:
        return False
    ye.write(path, text)
    return True


def sync_dependencies(dvc_yaml: Path, files: Files) -> bool:
    """Make stages depend on the user's files (reward file, local models, task files); True if `dvc.yaml`
    changed.

    Adds what is missing to `deps` and removes lines that an earlier call added for files no longer used.
    Paths are written relative to the folder of `dvc.yaml` where they lie in it. Raises `ConfigError` if a
    stage is missing.
    """
    path = Path(dvc_yaml)
    text = original = ye.read(path)
    for stage, wanted in _per_stage(path, files).items():
        text = _sync_stage(path, text, stage, wanted)
    if text == original:
        return False
    ye.write(path, text)
    return True


def missing_dependencies(dvc_yaml: Path, files: Files) -> dict[str, list[str]]:
    """Per stage, the files that it does not depend on but should; empty means nothing is missing. Changes
    nothing.
    """
    path = Path(dvc_yaml)
    root = ye.parse(ye.read(path), path)
    missing = {}
    for stage, wanted in _per_stage(path, files).items():
        found = ye.get(_body(path, root, stage), "deps")
        present = {_name(entry) for entry in _entries(found)}
        if absent := [file for file in wanted if file not in present]:
            missing[stage] = absent
    return missing


def _per_stage(path: Path, files: Files) -> dict[str, list[str]]:
    per_stage = files if isinstance(files, Mapping) else dict.fromkeys(USER_FILE_STAGES, files)
    root = path.resolve().parent
    result = {}
    for stage in dict.fromkeys([*USER_FILE_STAGES, *per_stage]):
        names = []
        for file in per_stage.get(stage, ()):
            absolute = (root / Path(file).expanduser()).resolve()
            names.append(absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else str(absolute))
        result[stage] = list(dict.fromkeys(names))
    return result


def _set_scalar(path: Path, text: str, key: str, written: str) -> str:
    root = ye.parse(text, path)
    at_top = ye.get(root, key)
    found = [at_top] if at_top else ye.find_all(root, key)
    if len(found) > 1:
        raise ConfigError(f"{path} has {key} in {len(found)} places; it must be in one")
    if not found:
        return ye.insert_lines(text, len(text), [f"{key}: {written}"])
    key_node, node = found[0]
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{key} in {path} must be one value")
    quoted = written.startswith("'")
    if node.value == written.strip("'") and (node.style in ("'", '"')) == quoted:
        return text
    return ye.replace_value(text, key_node, node, written)


def _empty_mapping(path: Path, text: str, name: str) -> str:
    """Let `name`, where it is there, hold nothing: DVC then has no stages of that kind."""
    found = ye.get(ye.parse(text, path), name)
    if found is None or not ye.is_block(found[1]):
        return text
    text = ye.cut_lines(text, found[1].value[0][0], found[1])
    emptied = ye.get(ye.parse(text, path), name)
    assert emptied is not None
    return ye.replace_value(text, *emptied, "{}")


def _set_mapping(path: Path, text: str, name: str, n: int) -> str:
    found = ye.get(ye.parse(text, path), name)
    if found is None:
        return ye.insert_lines(text, len(text), [f"{name}:", *_iteration_lines(1, n, "  ")])
    key, mapping = found
    if not ye.is_block(mapping):
        text = ye.replace_value(text, key, mapping, "")
        return ye.insert_lines(text, ye.line_end(text, ye.end(key)), _iteration_lines(1, n, "  "))
    entries = list(ye.items(mapping))
    right = next((i for i, entry in enumerate(entries) if not _is_iteration(entry, i + 1)), len(entries))
    kept = min(right, n)
    position = ye.line_end(text, ye.end(mapping))
    indent = " " * entries[0][0].start_mark.column
    if kept < len(entries):
        position = ye.line_start(text, ye.start(entries[kept][0]))
        text = ye.cut_lines(text, entries[kept][0], mapping)
    return ye.insert_lines(text, position, _iteration_lines(kept + 1, n, indent))


def _iteration_lines(first: int, last: int, indent: str) -> list[str]:
    numbers = range(first, last + 1)
    return [f"{indent}'{iteration_key(i)}': {{previous: '{iteration_key(i - 1)}'}}" for i in numbers]


def _is_iteration(entry: tuple[Node, Node], number: int) -> bool:
    """True means: the entry is what iteration `number` needs, with both numbers quoted (0001 alone is the
    integer 1).
    """
    key, value = entry
    fields = list(ye.items(value))
    return (
        _is_quoted(key, iteration_key(number))
        and len(fields) == 1
        and fields[0][0].value == "previous"
        and _is_quoted(fields[0][1], iteration_key(number - 1))
    )


def _is_quoted(node: Node, value: str) -> bool:
    return isinstance(node, ScalarNode) and node.style in ("'", '"') and node.value == value


def _sync_stage(path: Path, text: str, stage: str, wanted: Sequence[str]) -> str:
    body = _body(path, ye.parse(text, path), stage)
    found = ye.get(body, "deps")
    entries = _entries(found)
    missing = [file for file in wanted if file not in {_name(entry) for entry in entries}]
    owned = [entry for entry in entries if MARK in text[ye.end(entry) : ye.line_end(text, ye.end(entry))]]
    unused = [entry for entry in owned if _name(entry) not in wanted]
    if not missing and not unused:
        return text
    if found is None:
        first = body.value[0][0]
        indent = " " * first.start_mark.column
        lines = [f"{indent}deps:", *_dependency_lines(missing, f"{indent}  - ")]
        return ye.insert_lines(text, ye.line_start(text, ye.start(first)), lines)
    key, deps = found
    if not ye.is_block(deps):  # deps: [a, b]
        indent = " " * (key.start_mark.column + 2)
        lines = [f"{indent}- {text[ye.start(entry) : ye.end(entry)]}" for entry in entries]
        text = ye.replace_value(text, key, deps, "")
        return ye.insert_lines(text, ye.line_end(text, ye.end(key)), lines + _dependency_lines(missing, f"{indent}- "))
    if len(unused) == len(deps.value) and not missing:
        return ye.cut_lines(text, key, deps)
    prefix = text[ye.line_start(text, ye.start(deps.value[0])) : ye.start(deps.value[0])]
    text = ye.insert_lines(text, ye.line_end(text, ye.end(deps)), _dependency_lines(missing, prefix))
    for entry in reversed(unused):  # from the end, so that earlier positions stay right
        text = ye.cut_lines(text, entry, entry)
    return text


def _dependency_lines(files: Sequence[str], prefix: str) -> list[str]:
    return [f"{prefix}{ye.scalar(file)}  {MARK}" for file in files]


def _body(path: Path, root: MappingNode, stage: str) -> MappingNode:
    """The mapping of `stage` that holds `cmd` and `deps` (below `do` for a `foreach` stage)."""
    stages = ye.get(root, "stages")
    found = ye.get(stages[1] if stages else None, stage)
    if found is None:
        names = [key.value for key, _ in ye.items(stages[1] if stages else None)]
        raise ConfigError(f"{path} has no stage {stage}; it has {', '.join(names) or 'none'}")
    inner = ye.get(found[1], "do")
    body = inner[1] if inner else found[1]
    if not isinstance(body, MappingNode) or not ye.is_block(body):
        raise ConfigError(f"stage {stage} in {path} must be a mapping written over several lines")
    return body


def _entries(found: tuple[Node, Node] | None) -> list[ScalarNode]:
    if found is None or not isinstance(found[1], SequenceNode):
        return []
    return [entry for entry in found[1].value if isinstance(entry, ScalarNode)]


def _name(entry: ScalarNode) -> str:
    return str(entry.value).replace("\\${", "${")
