import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import collect, evaluate, pair, prepare, sample, score, update
from tasks.calling import OPTIONS, call, orchestrated


@task(**OPTIONS)
def add(first: int, second: int = 1) -> int:
    return first + second


@flow
def add_flow(first: int) -> int:
    return first + 10


def test_outside_of_a_flow_run_steps_are_plain_calls() -> None:
    assert not orchestrated()
    assert call(add, 1) == 2
    assert call(add, 1, second=2) == 3
    assert call(add_flow, 1) == 11


def test_inside_a_flow_run_steps_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.calling.FlowRunContext.get", lambda: object())
    monkeypatch.setattr(type(add), "__call__", lambda self, *args, **kwargs: (self.name, args, kwargs))
    assert orchestrated()
    assert call(add, 1, second=2) == ("add", (1,), {"second": 2})


def test_no_stage_is_cached_kept_or_repeated_by_prefect() -> None:
    """DVC says what is up to date; and what failed once in training fails again."""
    stages = (
        *(collect.collect, score.score, pair.pair, sample.sample, update.update, update.publish),
        *(prepare.prepare, evaluate.evaluate_iteration, evaluate.summarize_run),
    )
    for stage in stages:
        assert stage.cache_policy == NO_CACHE, stage.name
        assert stage.persist_result is False, stage.name
        assert stage.retries == 0, stage.name
