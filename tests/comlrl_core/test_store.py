"""Where iterations live, and the manifest that ties them together."""

import json
import os
import shutil
from pathlib import Path

import pytest

from comlrl_core.errors import DataError
from comlrl_core.files import sha256_file
from comlrl_core.preference.files import write_iteration
from comlrl_core.store import (
    MANIFEST,
    IterationEntry,
    Manifest,
    Store,
    check_unoccupied,
    initial_manifest,
    latest,
    link_folder,
    manifest_digest,
    move_folder,
    verify_history,
    whole_folder,
)


def entry(store: Store, iteration: int) -> IterationEntry:
    path, _ = write_iteration(store.replay, iteration, [], {})
    return IterationEntry(iteration, 0, sha256_file(path))


def test_the_layout_of_a_project() -> None:
    store = Store.below(Path("p"))
    assert (store.replay, store.models, store.state) == (Path("p/replay"), Path("p/models"), Path("p/state"))
    assert store.policy(3) == Path("p/models/iteration_0003")
    assert store.training_state(12345) == Path("p/state/iteration_12345")


def test_a_manifest_reads_back_and_has_no_time_or_place(tmp_path: Path) -> None:
    first = initial_manifest("inputs")
    second = first.next(inputs="other", previous="abc", entry=IterationEntry(1, 5, "d" * 64), environment_steps=10)
    assert (second.iteration, second.eligible(), second.policy) == (1, [1], "")
    third = second.next(inputs="x", previous="y", entry=IterationEntry(2, 0, "e" * 64), environment_steps=10)
    assert third.eligible() == [1, 2]
    for manifest in (first, second, third):
        manifest.write(tmp_path / MANIFEST)
        assert Manifest.read(tmp_path / MANIFEST) == manifest
    bytes_before = (tmp_path / MANIFEST).read_bytes()
    third.write(tmp_path / MANIFEST)
    assert (tmp_path / MANIFEST).read_bytes() == bytes_before
    assert str(tmp_path).encode() not in bytes_before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"iteration": "1"}, "iteration must be int, not '1'"),
        ({"history": None}, "history must be list"),
        ({"policy": None}, "policy must be str"),
        ({"history": [{"iteration": 1}]}, r"history\[0\]: field 'num_pairs' is missing"),
        ({"history": [7]}, r"history\[0\]: expected an object"),
        ({"surprise": 1}, "not a manifest of this version"),
    ],
)
def test_a_damaged_manifest_names_file_and_field(tmp_path: Path, change: dict, named: str) -> None:
    path = tmp_path / MANIFEST
    initial_manifest("inputs").write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=named) as error:
        Manifest.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_torn_or_foreign_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=MANIFEST):
        Manifest.read(tmp_path / MANIFEST)


def test_an_iteration_counts_once_its_manifest_is_there(tmp_path: Path) -> None:
    store = Store.below(tmp_path)
    assert latest(store) is None and not store.has(0)
    with pytest.raises(DataError):
        store.manifest(0)
    for iteration in (0, 2, 10):
        store.policy(iteration).mkdir(parents=True)
        initial_manifest(str(iteration)).write(store.policy(iteration) / MANIFEST)
    store.policy(11).mkdir()
    assert latest(store) == 10 and store.has(2) and not store.has(11)
    assert store.manifest(2).inputs == "2"
    assert manifest_digest(store, 2) == sha256_file(store.policy(2) / MANIFEST) != manifest_digest(store, 0)


def test_a_folder_of_another_name_among_the_iterations_is_no_iteration(tmp_path: Path) -> None:
    store = Store.below(tmp_path)
    for name in ("iteration_best", "iteration_0001"):
        (store.models / name).mkdir(parents=True)
        initial_manifest("x").write(store.models / name / MANIFEST)
    assert latest(store) == 1


def test_a_kill_in_the_middle_leaves_a_torn_folder(tmp_path: Path) -> None:
    """Pitfall 28: a folder is whole or absent, and an old one stays until the new one is whole."""
    target = tmp_path / "models" / "iteration_0001"
    with pytest.raises(KeyboardInterrupt), whole_folder(target) as staging:
        (staging / "half").write_text("x")
        raise KeyboardInterrupt
    assert not target.exists() and list(target.parent.iterdir()) == []
    with whole_folder(target) as staging:
        (staging / "whole").write_text("1")
        assert not target.exists()
    with pytest.raises(ValueError), whole_folder(target) as staging:
        (staging / "half").write_text("x")
        raise ValueError
    assert [path.name for path in target.iterdir()] == ["whole"]
    with whole_folder(target) as staging:
        (staging / "newer").write_text("2")
    assert [path.name for path in target.iterdir()] == ["newer"]
    assert [path.name for path in target.parent.iterdir()] == ["iteration_0001"]


def test_a_folder_moves_into_the_place_of_another(tmp_path: Path) -> None:
    for name in ("source", "deep/target"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    move_folder(tmp_path / "source", tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target" / "file").read_text() == "source"
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]


def test_a_linked_folder_outlives_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system without hard links."""

    def refuses(*_: object) -> None:
        raise OSError("no links here")

    for name in ("linked", "copied"):
        source, target = tmp_path / f"{name}.source", tmp_path / name
        (source / "agent_0").mkdir(parents=True)
        (source / "agent_0" / "weights").write_text("1")
        target.mkdir()
        (target / "outdated").touch()
        link_folder(source, target)
        shutil.rmtree(source)
        assert [path.relative_to(target).as_posix() for path in target.rglob("*")] == ["agent_0", "agent_0/weights"]
        assert (target / "agent_0" / "weights").read_text() == "1"
        monkeypatch.setattr(os, "link", refuses)


def test_two_runs_in_one_folder_overwrite_each_others_iteration_files(tmp_path: Path) -> None:
    """Pitfall 27: a folder with files of another run is refused; an empty or absent one is fine."""
    check_unoccupied(tmp_path / "absent")
    check_unoccupied(tmp_path)
    write_iteration(tmp_path, 1, [], {})
    with pytest.raises(DataError, match=r"already holds iteration files \(iteration_0001\.json"):
        check_unoccupied(tmp_path)


def test_a_history_must_be_there_byte_for_byte(tmp_path: Path) -> None:
    store = Store.below(tmp_path)
    manifest = initial_manifest("x")
    verify_history(store, manifest)
    for iteration in (1, 2):
        manifest = manifest.next(inputs="x", previous="", entry=entry(store, iteration), environment_steps=0)
    verify_history(store, manifest)
    path = store.replay / "iteration_0001.json"
    text = path.read_text()
    path.write_text(text + " ")
    with pytest.raises(DataError, match=r"iteration_0001\.json: changed since iteration 2"):
        verify_history(store, manifest)
    path.unlink()
    with pytest.raises(DataError, match=r"iteration_0001\.json: missing"):
        verify_history(store, manifest)
