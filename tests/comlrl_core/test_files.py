"""Files are whole or absent, JSON is strict and exact."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comlrl_core import files
from comlrl_core.errors import DataError


def test_json_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22, math.pi]
    files.write_json(tmp_path / "a.json", {"values": values})
    assert [v.hex() for v in files.read_json(tmp_path / "a.json")["values"]] == [v.hex() for v in values]


def test_json_is_utf8_with_a_final_newline_in_the_given_key_order(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": "Žluťoučký", "a": 1})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "b": "Žluťoučký",\n  "a": 1\n}\n'.encode()
    files.write_json(tmp_path / "a.json", {"b": 2, "a": 1}, sort_keys=True, indent=None)
    assert (tmp_path / "a.json").read_text() == '{"a": 1, "b": 2}\n'


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", ["cut \ud83d", "whole 😀"])
    assert files.read_json(tmp_path / "a.json") == ["cut \ud83d", "whole 😀"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": NaN}', "line 2 column 7: NaN"),
        ('["NaN", -Infinity]', "line 1 column 9: -Infinity"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs more than once"),
        ('{"a": 1,\n"b"', "line 2 column 4: not valid JSON"),
        ("", "line 1 column 1: not valid JSON"),
        ("[1e999]", "1e999 is too large"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_json_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        files.read_json(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_missing_file_and_wrong_bytes_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json: cannot be read"):
        files.read_json(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(DataError, match="byte 1 is not UTF-8"):
        files.read_json(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"pairs": [{"x": math.nan}]}, r"field pairs\[0\].x: nan"),
        ({"a": {1, 2}}, "field a: a set has no JSON form"),
    ],
)
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path, value: object, message: str) -> None:
    files.write_json(tmp_path / "a.json", "old")
    with pytest.raises(DataError, match=message):
        files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_jsonl_splits_at_newlines_alone(tmp_path: Path) -> None:
    rows = [{"text": "one\u2028two\x85three"}, {"text": "four"}]
    assert files.write_jsonl(tmp_path / "a.jsonl", rows) == 2
    assert files.read_jsonl(tmp_path / "a.jsonl") == rows


def test_jsonl_reads_windows_files_and_names_the_line_of_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert list(files.iter_jsonl(path)) == [(1, {"a": 1}), (3, {"a": 2})]
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    with pytest.raises(DataError, match=r"a\.jsonl: line 2 column 8"):
        files.read_jsonl(path)
    path.write_bytes(b'{"a": 1}\n[2]\n')
    with pytest.raises(DataError, match="line 2: expected a JSON object, found list"):
        files.read_jsonl(path)


def test_a_bad_row_leaves_the_old_jsonl(tmp_path: Path) -> None:
    files.write_jsonl(tmp_path / "a.jsonl", [{"a": 1}])
    with pytest.raises(DataError, match="line 2: field a: inf"):
        files.write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, {"a": math.inf}])
    assert files.read_jsonl(tmp_path / "a.jsonl") == [{"a": 1}]


def test_an_error_or_interrupt_inside_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    files.atomic_write_text(tmp_path / "a", "old")
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), files.atomic_open(tmp_path / "a") as file:
            file.write(b"half of the n")
            raise error
    assert (tmp_path / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """Pitfall 28: the writer is killed after half of its bytes are on disk."""
    path = tmp_path / "iteration_0001.json"
    files.write_json(path, {"old": True})
    code = (
        "import sys, time\nfrom comlrl_core.files import atomic_open\n"
        "with atomic_open(sys.argv[1]) as file:\n"
        "    file.write(b'{\"new\": tr'); file.flush(); print('half', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=10)
    child.stdout.close()
    assert files.read_json(path) == {"old": True}


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """One process rewrites a file of 1 MB again and again; every read in between finds a whole one."""
    path = tmp_path / "a.json"
    files.write_json(path, [0] * 1000)
    code = (
        "import sys\nfrom comlrl_core.files import write_json\n"
        "for i in range(30): write_json(sys.argv[1], [i] * 100_000, indent=None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < deadline:
        value = files.read_json(path)
        assert len(set(value)) == 1 and len(value) in (1000, 100_000)
    assert child.wait(timeout=30) == 0
    assert files.read_json(path) == [29] * 100_000


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    """A cache may hand out links to its own files; writing must not reach through them."""
    (tmp_path / "cached").write_text("cached")
    (tmp_path / "link").symlink_to(tmp_path / "cached")
    files.atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "cached").read_text() == "cached"
    assert (tmp_path / "link").read_text() == "new"


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    """The digest of `abc` is the example of FIPS 180-2."""
    (tmp_path / "abc").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256_file(tmp_path / "abc") == expected
