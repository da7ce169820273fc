from collections.abc import Callable

import pytest

from comlrl_core.preference.files import iteration_path, read_iteration
from tasks import sample as module
from tasks.collect import collect
from tasks.job import Job
from tasks.pair import pair
from tasks.records import read_records
from tasks.sample import sample
from tasks.score import score
from tasks.steps import steps_of

MakeJob = Callable[..., Job]


def paired(job: Job, iteration: int) -> Job:
    collect.fn(job, iteration, 0)
    score.fn(job, iteration, 0)
    pair.fn(job, iteration)
    return job


def test_by_default_the_iterations_own_pairs_are_drawn(unbroken: MakeJob) -> None:
    job = paired(unbroken(), 2)
    drawn = read_records(sample.fn(job, 2))
    own = read_iteration(iteration_path(job.store.replay, 2))
    assert sorted(map(repr, drawn)) == sorted(map(repr, own))


def test_history_is_what_the_manifest_lists_not_what_lies_in_the_folder(unbroken: MakeJob) -> None:
    """A file of another run in the replay folder is never learned from."""
    job = unbroken(training={"preference_replay_mode": "all_history", "preference_replay_sample_size": 200})
    paired(job, 2)
    stray = iteration_path(job.store.replay, 7)
    foreign = iteration_path(job.store.replay, 1).read_text().replace('"iteration": 1', '"iteration": 7')
    stray.write_text(foreign.replace("length-ratio", "foreign"))
    drawn = {repr(record) for record in read_records(sample.fn(job, 2))}
    assert drawn == {repr(r) for n in (1, 2) for r in read_iteration(iteration_path(job.store.replay, n))}


def test_a_finished_draw_is_not_repeated(unbroken: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = paired(unbroken(), 2)
    path = sample.fn(job, 2)
    assert path == steps_of(job, 2).drawn
    monkeypatch.setattr(module, "draw_pairs", lambda *_: pytest.fail("drawn again"))
    assert sample.fn(job, 2) == path
