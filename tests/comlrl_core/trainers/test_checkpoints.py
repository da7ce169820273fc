"""Finding and thinning out checkpoints."""

from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import write_json
from comlrl_core.store import MANIFEST
from comlrl_core.trainers.checkpoints import (
    IDENTITY,
    STATE,
    check_checkpointing,
    differences,
    find_checkpoint,
    keep_newest,
    list_checkpoints,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (2, 10, 9):
        (tmp_path / f"iteration_{number:04d}").mkdir()
        (tmp_path / f"iteration_{number:04d}" / MANIFEST).touch()
    (tmp_path / "iteration_0011").mkdir()  # not complete
    (tmp_path / "replay").mkdir()
    return tmp_path


def test_complete_checkpoints_are_listed_oldest_first(folder: Path) -> None:
    assert [path.name for path in list_checkpoints(folder)] == ["iteration_0002", "iteration_0009", "iteration_0010"]
    assert list_checkpoints(folder / "absent") == []


def test_a_checkpoint_or_the_newest_below_a_folder(folder: Path) -> None:
    newest = folder / "iteration_0010"
    assert find_checkpoint(folder, None) == find_checkpoint(str(folder), None) == newest
    assert find_checkpoint(True, folder) == newest
    assert find_checkpoint(folder / "iteration_0002", folder) == folder / "iteration_0002"


def test_no_checkpoint_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no checkpoint there"):
        find_checkpoint(folder / "replay", None)
    with pytest.raises(ConfigError, match="needs checkpoint_dir"):
        find_checkpoint(True, None)


def test_old_ones_go_and_the_rest_stays(folder: Path) -> None:
    keep_newest(folder, None)
    keep_newest(folder, 5)
    assert len(list_checkpoints(folder)) == 3
    keep_newest(folder, 1)
    assert [path.name for path in list_checkpoints(folder)] == ["iteration_0010"]
    assert (folder / "replay").is_dir() and (folder / "iteration_0011").is_dir()


@pytest.mark.parametrize(
    ("interval", "limit", "named"), [(0, None, "checkpoint_interval"), (1, 0, "checkpoint_total_limit")]
)
def test_impossible_numbers_are_refused_before_training(interval: int, limit: int | None, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} must be at least 1"):
        check_checkpointing(interval, limit)


def test_differences_are_told_by_name(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    write_json(tmp_path / STATE / IDENTITY, {"dpo_beta": 0.1, "seed": 0, "gone": 1})
    assert differences(tmp_path, {"dpo_beta": 0.1, "seed": 0, "gone": 1}) == []
    assert differences(tmp_path, {"dpo_beta": 0.3, "seed": 0, "new": 2}) == [
        "dpo_beta is 0.3, was 0.1",
        "new is 2, was None",
        "gone is None, was 1",
    ]
