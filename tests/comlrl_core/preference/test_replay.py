"""Replay: which files, with which weights, in which order; by hand and by counting."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from comlrl_core import notices
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.files import write_iteration
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.replay import ReplaySample, ReplaySettings, replay_weights, sample_replay


def fill(folder: Path, sizes: dict[int, int]) -> Path:
    """Files with that many pairs each; pair 2 of iteration 3 has the task id `3:2`."""
    for iteration, size in sizes.items():
        records = [PairRecord(("p",), ("a",), ("b",), 1.0, 0.0, 0.5, task_id=f"{iteration}:{i}") for i in range(size)]
        write_iteration(folder, iteration, records, {})
    return folder


def ids(sample: ReplaySample) -> list[str]:
    return [record.task_id or "" for record in sample.records]


def draw(folder: Path, iteration: int, settings: ReplaySettings, eligible: Any = None, seed: int = 0) -> ReplaySample:
    own = range(1, iteration + 1) if eligible is None else eligible
    return sample_replay(folder, iteration, list(own), settings, (seed, iteration, "sample"))


SIZES = {1: 4, 2: 0, 3: 6, 4: 5}


@pytest.mark.parametrize(
    ("sizes", "settings", "expected"),
    [
        (SIZES, ReplaySettings(), {4: 1.0}),
        (SIZES, ReplaySettings("nearest_k", k=1), {4: 1.0}),
        (SIZES, ReplaySettings("nearest_k", k=2), {4: 1 / 2, 3: 1 / 2}),
        (SIZES, ReplaySettings("nearest_k", k=3), {4: 1 / 3, 3: 1 / 3, 1: 1 / 3}),
        (SIZES, ReplaySettings("nearest_k", k=9), {4: 1 / 3, 3: 1 / 3, 1: 1 / 3}),
        (SIZES, ReplaySettings("all_history"), {4: 1 / 3, 3: 1 / 3, 1: 1 / 3}),
        (SIZES, ReplaySettings("lambda_decay", lam=0.5), {4: 4 / 7, 3: 2 / 7, 1: 1 / 7}),
        (SIZES, ReplaySettings("lambda_decay", lam=1), {4: 1 / 3, 3: 1 / 3, 1: 1 / 3}),
        (SIZES, ReplaySettings("lambda_decay", lam=0.0), {4: 1.0, 3: 0.0, 1: 0.0}),
        ({1: 2, 2: 3, 3: 0}, ReplaySettings("lambda_decay", lam=0.5), {2: 2 / 3, 1: 1 / 3}),
        ({1: 2, 2: 0}, ReplaySettings("nearest_k", k=1), {1: 1.0}),
        ({1: 0, 2: 0}, ReplaySettings("all_history"), {}),
    ],
)
def test_weights_by_hand(sizes: dict[int, int], settings: ReplaySettings, expected: dict[int, float]) -> None:
    """lambda = 1/2 over three files with pairs: 1, 1/2, 1/4 over 7/4. 0^0 = 1: 0 leaves the newest."""
    assert replay_weights(sizes, settings) == pytest.approx(expected)


def test_current_takes_all_pairs_of_the_iteration_in_file_order(tmp_path: Path) -> None:
    fill(tmp_path, SIZES)
    sample = draw(tmp_path, 4, ReplaySettings())
    assert ids(sample) == ["4:0", "4:1", "4:2", "4:3", "4:4"] and sample.counts == {4: 5}
    assert draw(tmp_path, 2, ReplaySettings()).records == []


def test_default_size_is_that_of_this_iteration_or_of_the_newest_with_pairs(tmp_path: Path) -> None:
    fill(tmp_path, {1: 4, 2: 7, 3: 0, 4: 5})
    history = ReplaySettings("all_history")
    assert len(draw(tmp_path, 4, history).records) == 5
    assert len(draw(tmp_path, 3, history).records) == 7  # this one has none: the size of iteration 2
    assert len(draw(tmp_path, 4, ReplaySettings("all_history", sample_size=40)).records) == 40


def test_lambda_zero_is_the_newest_file_shuffled(tmp_path: Path) -> None:
    fill(tmp_path, {1: 9, 2: 8})
    sample = draw(tmp_path, 2, ReplaySettings("lambda_decay", lam=0.0))
    assert sorted(ids(sample)) == [f"2:{i}" for i in range(8)] and sample.counts == {1: 0, 2: 8}
    assert ids(sample) != sorted(ids(sample))


def test_a_file_repeats_only_when_it_is_used_up(tmp_path: Path) -> None:
    """25 draws from 10 pairs: each twice, and 5 of them a third time."""
    fill(tmp_path, {1: 10})
    sample = draw(tmp_path, 1, ReplaySettings("nearest_k", k=1, sample_size=25))
    assert sorted(Counter(ids(sample)).values()) == [2] * 5 + [3] * 5
    few = draw(tmp_path, 1, ReplaySettings("nearest_k", k=1, sample_size=10))
    assert sorted(ids(few)) == [f"1:{i}" for i in range(10)]


def test_draws_follow_the_weights(tmp_path: Path) -> None:
    """lambda = 1/2, 7000 draws: 4000, 2000, 1000 expected; sqrt(7000 p (1 - p)) = 41, 38, 29."""
    fill(tmp_path, SIZES)
    counts = draw(tmp_path, 4, ReplaySettings("lambda_decay", lam=0.5, sample_size=7000)).counts
    assert sum(counts.values()) == 7000 and counts[2] == 0
    assert abs(counts[4] - 4000) < 164 and abs(counts[3] - 2000) < 152 and abs(counts[1] - 1000) < 116


def test_each_draw_picks_its_file_on_its_own(tmp_path: Path) -> None:
    """Two equal files, 10 draws, 400 seeds: a quota always gives 5, a multinomial mean 5 and variance 2.5.

    The mean of 400 has a standard deviation of 0.08, their variance one of about 0.18.
    """
    fill(tmp_path, {1: 20, 2: 20})
    settings = ReplaySettings("all_history", sample_size=10)
    hits = [draw(tmp_path, 2, settings, seed=seed).counts[1] for seed in range(400)]
    mean = sum(hits) / 400
    variance = sum((hit - mean) ** 2 for hit in hits) / 400
    assert abs(mean - 5) < 0.32 and abs(variance - 2.5) < 0.72


def test_files_are_mixed(tmp_path: Path) -> None:
    """Of 60 draws from two files in 60! orders, all of one file first is no accident."""
    fill(tmp_path, {1: 30, 2: 30})
    sample = draw(tmp_path, 2, ReplaySettings("all_history", sample_size=60))
    origins = [name.split(":")[0] for name in ids(sample)]
    assert origins != sorted(origins) and origins != sorted(origins, reverse=True)


def test_the_stream_decides_everything(tmp_path: Path) -> None:
    fill(tmp_path, SIZES)
    settings = ReplaySettings("all_history", sample_size=30)
    first = ids(draw(tmp_path, 4, settings))
    assert ids(draw(tmp_path, 4, settings, eligible=[4, 3, 2, 1])) == first
    assert ids(draw(tmp_path, 4, settings, seed=1)) != first


def test_files_that_are_not_listed_are_not_drawn_from(tmp_path: Path) -> None:
    """Iteration 1 was left by an earlier run: it is in the folder but not in the history."""
    fill(tmp_path, SIZES)
    sample = draw(tmp_path, 4, ReplaySettings("all_history", sample_size=50), eligible=[3])
    assert set(sample.counts) == {3, 4} and {name[0] for name in ids(sample)} == {"3", "4"}


def test_nothing_at_all_is_an_empty_sample(tmp_path: Path) -> None:
    fill(tmp_path, {1: 0, 2: 0})
    assert draw(tmp_path, 2, ReplaySettings("all_history", sample_size=5)) == ([], {1: 0, 2: 0})


def test_a_missing_torn_or_later_file_is_named(tmp_path: Path) -> None:
    fill(tmp_path, {1: 3, 3: 3})
    with pytest.raises(DataError, match=r"iteration_0002\.json: cannot be read"):
        draw(tmp_path, 3, ReplaySettings("all_history"))
    (tmp_path / "iteration_0002.json").write_text('{"iteration": 2, "num_pa')
    with pytest.raises(DataError, match=r"iteration_0002\.json: .*not valid JSON"):
        draw(tmp_path, 3, ReplaySettings("all_history"))
    with pytest.raises(DataError, match="iteration 3 is later than 1"):
        draw(tmp_path, 1, ReplaySettings("all_history"), eligible=[1, 3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "newest"}, "'newest' is unknown; allowed: current, nearest_k, all_history, lambda_decay"),
        ({"mode": "nearest_k"}, "preference_replay_k: .*nearest_k needs one"),
        ({"mode": "nearest_k", "k": 0}, "preference_replay_k: must be null or an integer of at least 1"),
        ({"mode": "nearest_k", "k": True}, "preference_replay_k"),
        ({"mode": "nearest_k", "k": 2, "lam": 0.5}, "preference_replay_lambda: belongs to lambda_decay"),
        ({"mode": "all_history", "k": 1}, "preference_replay_k: belongs to nearest_k"),
        ({"mode": "all_history", "lam": 1.0}, "preference_replay_lambda: belongs to lambda_decay"),
        ({"mode": "lambda_decay"}, "preference_replay_lambda: .*lambda_decay needs one"),
        ({"mode": "lambda_decay", "lam": 0.5, "k": 2}, "preference_replay_k: belongs to nearest_k"),
        ({"mode": "lambda_decay", "lam": 1.1}, "preference_replay_lambda: must be a number"),
        ({"mode": "lambda_decay", "lam": float("nan")}, "preference_replay_lambda: must be a number"),
        ({"mode": "lambda_decay", "lam": True}, "preference_replay_lambda: must be a number"),
        ({"mode": "current", "k": 2}, "preference_replay_k: must be null or 1 under current, got 2"),
        ({"mode": "all_history", "sample_size": 0}, "preference_replay_sample_size: must be null or"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplaySettings(**settings)


def test_current_takes_k_one_and_says_once_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    notices.forget()
    ReplaySettings(k=1)
    assert not caplog.records
    for _ in range(2):
        ReplaySettings(sample_size=5, lam=0.5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("has no effect" in line for line in said)
    assert "preference_replay_sample_size" in said[0] and "preference_replay_lambda" in said[1]
    notices.forget()
