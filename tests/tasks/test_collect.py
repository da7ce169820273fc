from collections.abc import Callable

import pytest

from comlrl_core.preference.candidates import read_candidates
from tasks import collect as module
from tasks.collect import collect, num_chunks
from tasks.job import Job
from tasks.steps import steps_of

MakeJob = Callable[..., Job]


def test_both_sides_answer_every_task(prepared: MakeJob) -> None:
    job = prepared()
    path = collect.fn(job, 1, 0)
    assert path == steps_of(job, 1).candidates(0)
    tasks = read_candidates(path)
    assert [task.task_id for task in tasks] == [f"length-ratio-train-{i:04d}" for i in range(3)]
    for task in tasks:
        assert len(task.current) == len(task.comparator or []) == 3
        assert {joint.source for joint in task.comparator or []} == {"current"}
        assert all(joint.reward is None for joint in task.responses)
        assert task.prompts[0].startswith("[1]") and task.prompts[1].startswith("[2]")


def test_finished_answers_are_not_sampled_again(prepared: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepared()
    path = collect.fn(job, 1, 0)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(module, "collect_answers", lambda *_, **__: pytest.fail("sampled again"))
    assert collect.fn(job, 1, 0) == path
    assert path.stat().st_mtime_ns == before


def test_a_failed_collection_leaves_no_file_and_lets_the_other_team_go(
    prepared: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepared(training={"comparator_policy": "current_copy"})
    opened = []
    real = module.comparator

    def remembered(*args: object) -> object:
        opened.append(real(*args))  # type: ignore[arg-type]
        return opened[-1]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "comparator", remembered)
    monkeypatch.setattr(module, "collect_answers", broken)
    with pytest.raises(RuntimeError):
        collect.fn(job, 1, 0)
    assert opened[0].team is None
    assert not steps_of(job, 1).candidates(0).exists()


@pytest.mark.parametrize(("size", "chunks"), [(None, 1), (1, 3), (2, 2), (3, 1), (9, 1)])
def test_chunks_cover_the_tasks(prepared: MakeJob, size: int | None, chunks: int) -> None:
    assert num_chunks(prepared(training={"collection_batch_size": size})) == chunks


def test_chunks_hold_the_same_answers_as_one_file(prepared: MakeJob) -> None:
    """Streams are named by task, so the batch that a task is in does not matter."""
    whole = read_candidates(collect.fn(prepared(), 1, 0))
    job = prepared(training={"collection_batch_size": 2})
    parts = [task for chunk in range(2) for task in read_candidates(collect.fn(job, 1, chunk))]
    assert parts == whole


def test_an_old_team_answers_under_history(unbroken: MakeJob) -> None:
    job = unbroken(training={"comparator_policy": "history"})
    tasks = read_candidates(collect.fn(job, 2, 0))
    assert {joint.source for task in tasks for joint in task.comparator or []} == {"history"}


def test_the_offline_algorithm_collects_one_side(prepared: MakeJob) -> None:
    job = prepared(algorithm="madpo", num_iterations=1)
    assert all(task.comparator is None for task in read_candidates(collect.fn(job, 1, 0)))
