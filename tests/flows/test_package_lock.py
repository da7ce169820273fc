import json
from pathlib import Path

import pytest

from flows.package_lock import check_lock, package_digest, write_lock

CODE = '"""Doc."""\n\n\ndef f(x: int = 1) -> int:\n    """Doc."""\n    return x + 1\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sub" / "code.py").write_text(CODE)
    (folder / "tasks.jsonl").write_text('{"prompt": "a"}\n')
    return folder


@pytest.mark.parametrize(
    "code",
    [
        CODE.replace("Doc", "Another text"),
        CODE.replace('    """Doc."""\n', ""),
        CODE.replace("return x + 1", "return (x+1)  # a comment"),
        "# a comment\n" + CODE,
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(package: Path, code: str) -> None:
    before = package_digest(package)
    (package / "sub" / "code.py").write_text(code)
    assert package_digest(package) == before


@pytest.mark.parametrize("old, new", [("x + 1", "x + 2"), ("= 1", "= None"), ("f(x", "f(y"), ("x + 1", "x - 1")])
def test_code_counts(package: Path, old: str, new: str) -> None:
    before = package_digest(package)
    (package / "sub" / "code.py").write_text(CODE.replace(old, new))
    assert package_digest(package) != before


def test_a_string_that_is_used_counts(package: Path) -> None:
    (package / "a.py").write_text('x = "one"\n')
    before = package_digest(package)
    (package / "a.py").write_text('x = "two"\n')
    assert package_digest(package) != before


def test_bundled_data_and_names_count_and_caches_do_not(package: Path) -> None:
    before = package_digest(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "code.pyc").write_bytes(b"x")
    (package / ".hidden").write_text("x")
    (package / "README.md").write_text("x")
    assert package_digest(package) == before
    (package / "tasks.jsonl").write_text('{"prompt": "b"}\n')
    changed = package_digest(package)
    assert changed != before
    (package / "sub" / "code.py").rename(package / "sub" / "other.py")
    assert package_digest(package) != changed


def test_the_lock_is_written_only_when_it_changed(tmp_path: Path) -> None:
    assert check_lock(tmp_path) == f"{tmp_path / 'comlrl.lock'} does not exist"
    assert write_lock(tmp_path)
    first = (tmp_path / "comlrl.lock").stat()
    assert not write_lock(tmp_path)
    assert (tmp_path / "comlrl.lock").stat().st_mtime_ns == first.st_mtime_ns
    assert check_lock(tmp_path) is None
    content = json.loads((tmp_path / "comlrl.lock").read_text())
    (tmp_path / "comlrl.lock").write_text(json.dumps(content | {"digest": "0" * 64}))
    assert "names other code" in str(check_lock(tmp_path))
    assert write_lock(tmp_path)
