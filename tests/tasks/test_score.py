import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from comlrl_core.errors import RewardError
from comlrl_core.preference.candidates import read_candidates
from tasks import score as module
from tasks.collect import collect
from tasks.job import Job
from tasks.score import ORACLE_BATCH, score
from tasks.steps import steps_of

MakeJob = Callable[..., Job]
SOMETIMES = """
calls = []
def score(first, second):
    calls.append(len(first))
    return [float("nan") if i % 3 == 0 else float(i) for i, _ in enumerate(first)]
"""


@pytest.fixture
def sometimes(tmp_path: Path, prepared: MakeJob) -> Callable[[str], Job]:
    """Jobs whose every third reward is NaN, for a policy of bad rewards."""
    (tmp_path / "mine.py").write_text(SOMETIMES)
    return lambda policy: prepared(reward={"function": "mine.py:score"}, training={"on_bad_reward": policy})


def test_every_answer_of_both_sides_is_scored(prepared: MakeJob) -> None:
    job = prepared()
    collect.fn(job, 1, 0)
    tasks = read_candidates(score.fn(job, 1, 0))
    assert all(joint.reward is not None for task in tasks for joint in task.responses)
    assert all(0 <= joint.raw_reward <= 1 for task in tasks for joint in task.responses)  # type: ignore[operator]
    unscored = read_candidates(steps_of(job, 1).candidates(0))
    assert [j.texts for t in tasks for j in t.responses] == [j.texts for t in unscored for j in t.responses]


def test_drops_are_counted_and_said(sometimes: Callable[[str], Job], caplog: pytest.LogCaptureFixture) -> None:
    job = sometimes("drop")
    collect.fn(job, 1, 0)
    with caplog.at_level(logging.WARNING, "comlrl_core"):
        tasks = read_candidates(score.fn(job, 1, 0))
    dropped = [joint for task in tasks for joint in task.responses if joint.dropped]
    assert len(dropped) == 3 * 2 * 3 / 3
    assert f"{len(dropped)} rewards were unusable and dropped" in caplog.text


def test_a_bad_reward_stops_the_run_and_leaves_no_file(sometimes: Callable[[str], Job]) -> None:
    job = sometimes("fail")
    collect.fn(job, 1, 0)
    with pytest.raises(RewardError, match=r"score.*length-ratio-train"):
        score.fn(job, 1, 0)
    assert not steps_of(job, 1).scored(0).exists()
    assert steps_of(job, 1).candidates(0).exists()  # what was sampled is not lost


def test_finished_scores_are_not_asked_for_again(prepared: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepared()
    collect.fn(job, 1, 0)
    path = score.fn(job, 1, 0)
    monkeypatch.setattr(module, "score_candidates", lambda *_: pytest.fail("asked again"))
    assert score.fn(job, 1, 0) == path


def test_the_oracle_gets_bounded_batches(tmp_path: Path, prepared: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ORACLE_BATCH >= 64
    monkeypatch.setattr(module, "ORACLE_BATCH", 4)
    (tmp_path / "mine.py").write_text(
        "def score(first, second):\n    assert len(first) <= 4\n    return [float(len(a)) for a in first]\n"
    )
    job = prepared(reward={"function": "mine.py:score"})
    collect.fn(job, 1, 0)
    tasks = read_candidates(score.fn(job, 1, 0))
    assert all(j.reward == len(j.texts[0]) for task in tasks for j in task.responses)
