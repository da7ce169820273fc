import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.files import sha256_file
from comlrl_core.preference.files import iteration_path, meta_path, read_iteration, read_meta
from tasks import pair as module
from tasks.collect import collect
from tasks.job import Job
from tasks.loading import comparator
from tasks.oracle import oracle
from tasks.pair import comparator_version, entry_of, pair
from tasks.score import score
from tasks.steps import steps_of

MakeJob = Callable[..., Job]


def scored(job: Job) -> Job:
    collect.fn(job, 1, 0)
    score.fn(job, 1, 0)
    return job


def test_pairs_and_their_meta_file_are_written(prepared: MakeJob) -> None:
    job = scored(prepared())
    counts = pair.fn(job, 1)
    records = read_iteration(iteration_path(job.store.replay, 1))
    meta = read_meta(job.store.replay, 1)
    assert counts == meta["counts"] and counts["pairs"] == len(records) == meta["num_pairs"]
    assert counts["tasks"] == 3 and counts["pairs"] <= 3 * 2
    assert meta["policy"] == job.store.manifest(0).policy
    assert meta["oracle"] == oracle(job).label
    assert (meta["seed"], meta["comparator"]) == (1, "current")
    assert all(record.winner_reward > record.loser_reward and record.has_token_ids for record in records)


def test_the_entry_of_the_manifest_names_the_bytes(prepared: MakeJob) -> None:
    job = scored(prepared())
    pair.fn(job, 1)
    entry = entry_of(steps_of(job, 1))
    path = iteration_path(job.store.replay, 1)
    assert (entry.iteration, entry.digest) == (1, sha256_file(path))
    assert entry.num_pairs == len(read_iteration(path))


def test_finished_pairs_are_put_back_without_pairing_again(prepared: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated DVC stage starts by removing its outputs, the replay file among them."""
    job = scored(prepared())
    counts = pair.fn(job, 1)
    replay = [iteration_path(job.store.replay, 1), meta_path(job.store.replay, 1)]
    before = [path.read_bytes() for path in replay]
    for path in replay:
        path.unlink()
    monkeypatch.setattr(module, "write_pairs", lambda *_, **__: pytest.fail("paired again"))
    assert pair.fn(job, 1) == counts
    assert [path.read_bytes() for path in replay] == before


def test_a_pairing_that_was_killed_is_started_afresh(prepared: MakeJob) -> None:
    job = scored(prepared())
    steps = steps_of(job, 1)
    steps.pairs.mkdir()
    (steps.pairs / "iteration_0001.json").write_text('{"iteration": 1, "num_pairs": 7, "pairs": [')
    assert pair.fn(job, 1)["pairs"] == len(read_iteration(iteration_path(job.store.replay, 1)))


def test_chunks_are_paired_as_one_collection(prepared: MakeJob) -> None:
    pair.fn(scored(prepared()), 1)
    path = iteration_path(prepared().store.replay, 1)
    whole = path.read_bytes()
    job = prepared(training={"collection_batch_size": 2})
    for chunk in range(2):
        collect.fn(job, 1, chunk)
        score.fn(job, 1, chunk)
    pair.fn(job, 1)
    assert path.read_bytes() == whole


def test_a_constant_oracle_gives_no_pair_and_counts_ties(
    tmp_path: Path, prepared: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text("def score(first, second):\n    return [0.5] * len(first)\n")
    job = scored(prepared(reward={"function": "mine.py:score"}))
    with caplog.at_level(logging.INFO, "comlrl_core"):
        counts = pair.fn(job, 1)
    assert counts["pairs"] == 0 and counts["ties"] > 0
    assert read_iteration(iteration_path(job.store.replay, 1)) == []
    assert f"0 pairs from 3 tasks ({counts['ties']} ties" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"comparator_policy": "current_copy"},
        {"comparator_policy": "history"},
        {"comparator_policy": "model", "comparator_model_name": "builtin:tiny"},
        {"comparator_policy": "model", "comparator_agents": ["builtin:tiny", "builtin:tiny"]},
    ],
)
def test_the_recorded_other_side_is_the_one_that_answers(unbroken: MakeJob, settings: dict[str, Any]) -> None:
    """Word for word what the Python trainer records, so that both doors write the same bytes."""
    job = unbroken(training=settings)
    other = comparator(job, 2)
    assert other is not None
    assert comparator_version(job, 2) == other.version


def test_the_offline_algorithm_records_no_other_side(prepared: MakeJob) -> None:
    assert comparator_version(prepared(algorithm="madpo", num_iterations=1), 1) is None
