"""`comlrl.lock`: the version of the learning code that a project's results were made with.

DVC stages depend on this small file instead of on the package's folder: a project need not contain the
package, and edited comments, docstrings or formatting rerun nothing.
"""

import ast
import hashlib
import json
import os
from pathlib import Path

import comlrl_core
from comlrl_core.errors import DataError
from comlrl_core.files import read_json

LOCK_NAME = "comlrl.lock"

_IGNORED_FOLDERS = {"__pycache__"}
_IGNORED_SUFFIXES = {".pyc", ".pyo", ".pyi", ".md", ".orig", ".swp", ".tmp"}


def package_digest(root: Path | None = None) -> str:
    """SHA-256 (hex) over the code and the data files of the package folder `root` (default: the installed
    comlrl_core).

    Python files enter by their syntax trees without docstrings, comments and positions, all other files by
    their bytes.
    """
    folder = Path(root) if root is not None else Path(comlrl_core.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda item: item.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if not path.is_file() or not _counts(relative):
            continue
        content = path.read_bytes()
        if path.suffix == ".py":
            content = _code(content, path)
        name = relative.as_posix().encode()
        digest.update(len(name).to_bytes(8, "big") + name + len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def lock_content() -> str:
    """What `comlrl.lock` says for the installed package."""
    content = {"package": "comlrl_core", "version": comlrl_core.__version__, "digest": package_digest()}
    return json.dumps(content, indent=2) + "\n"


def write_lock(work_root: Path) -> bool:
    """Bring `comlrl.lock` of the project up to date; True if it changed. An unchanged file is not touched."""
    path = Path(work_root) / LOCK_NAME
    content = lock_content()
    if path.is_file() and path.read_bytes() == content.encode():
        return False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
    return True


def check_readable(work_root: Path) -> None:
    """Refuse a `comlrl.lock` that is none of ours: it would be replaced. Raises `DataError`; an old one is fine."""
    path = Path(work_root) / LOCK_NAME
    if not path.exists():
        return
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("digest"), str):
        raise DataError(
            f"{path}: not a lock file of comlrl (field 'digest' is missing); remove it, a run writes its own"
        )


def check_lock(work_root: Path) -> str | None:
    """None if `comlrl.lock` names the installed package, else one sentence saying what differs."""
    path = Path(work_root) / LOCK_NAME
    installed = json.loads(lock_content())
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return f"{path} does not exist"
    except ValueError:  # not JSON, or not even UTF-8
        return f"{path} is not valid JSON"
    if not isinstance(recorded, dict) or recorded.get("digest") != installed["digest"]:
        version = recorded.get("version") if isinstance(recorded, dict) else None
        return f"{path} names other code (version {version}) than the installed version {installed['version']}"
    if recorded != installed:
        return f"{path} names version {recorded.get('version')}, installed is {installed['version']} (same code)"
    return None


def _counts(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    ignored = relative.suffix in _IGNORED_SUFFIXES or relative.name.endswith("~") or relative.name == "py.typed"
    return not hidden and not ignored and not _IGNORED_FOLDERS.intersection(relative.parts)


def _code(source: bytes, path: Path) -> bytes:
    try:
        tree = ast.parse(source, filename=str(path))
    except SyntaxError:  # a half-saved file is still a change
        return source
    parts: list[str] = []
    _write(tree, parts)
    return "".join(parts).encode("utf-8", "surrogatepass")


def _write(node: object, parts: list[str]) -> None:
    """Append a canonical form of a syntax tree.

    Not `ast.dump`: that prints fields which newer Python versions added, empty for older code, so that
    another interpreter would mean another digest.
    """
    if isinstance(node, ast.AST):
        parts.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name in ("kind", "type_comment", "type_ignores") or value is None or value == []:
                continue
            parts.append(f" {name}=")
            _write(_without_strings(value) if name == "body" and isinstance(value, list) else value, parts)
        if isinstance(node, ast.Constant) and node.value is None:
            parts.append(" value=None")
        parts.append(")")
    elif isinstance(node, list):
        parts.append("[")
        for item in node:
            _write(item, parts)
            parts.append(",")
        parts.append("]")
    else:
        parts.append(repr(node))


def _without_strings(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that are only a string do nothing at run time: docstrings, also of attributes."""
    return [
        statement
        for statement in body
        if not (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        )
    ]
