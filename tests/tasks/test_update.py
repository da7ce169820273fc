import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core import store
from comlrl_core.files import read_json
from comlrl_core.store import MANIFEST, manifest_digest, verify_history
from tasks import collect, pair, sample, score, update
from tasks.job import Job
from tasks.loading import forget, is_live, live
from tasks.steps import steps_of

MakeJob = Callable[..., Job]
STEPS = (
    lambda job: collect.collect.fn(job, 1, 0),
    lambda job: score.score.fn(job, 1, 0),
    lambda job: pair.pair.fn(job, 1),
    lambda job: sample.sample.fn(job, 1),
    lambda job: update.update.fn(job, 1),
    lambda job: update.publish.fn(job, 1),
)
REPEATABLE = (
    (collect, "collect_answers"),
    (score, "score_candidates"),
    (pair, "write_pairs"),
    (sample, "draw_pairs"),
    (update, "learn"),
)


def outputs(root: Path, iteration: int) -> dict[str, bytes]:
    """All bytes that DVC keeps of an iteration."""
    name = f"iteration_{iteration:04d}"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in ("replay", "models", "state")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and name in str(path.relative_to(root))
    }


@pytest.mark.parametrize("finished", range(1, 6))
def test_a_kill_between_steps_repeats_none_of_them_and_changes_no_byte(
    prepared: MakeJob, unbroken_tree: Path, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    job = prepared()
    for step in STEPS[:finished]:
        step(job)
    forget()  # what was in memory is gone
    update._unpublished.clear()
    for module, name in REPEATABLE[:finished]:
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was repeated"))
    for step in STEPS:
        step(job)
    assert outputs(job.work_root, 1) == outputs(unbroken_tree, 1)


def test_a_kill_inside_a_step_repeats_that_step(
    prepared: MakeJob, unbroken_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes after the first weights were written: neither half a folder nor a stepped team survives it."""
    job = prepared()
    for step in STEPS[:4]:
        step(job)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("comlrl_core.publishing.Manifest.write", killed, raising=False)
        with pytest.raises(KeyboardInterrupt):
            STEPS[4](job)
    assert not steps_of(job, 1).policy.exists()
    assert not is_live(job, 0)
    for step in STEPS:
        step(job)
    assert outputs(job.work_root, 1) == outputs(unbroken_tree, 1)


@pytest.mark.parametrize("moves", [0, 1])
def test_a_kill_while_publishing_is_made_good(
    prepared: MakeJob, unbroken_tree: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """The manifest comes last: a state without its policies is not published."""
    job = prepared()
    for step in STEPS[:5]:
        step(job)
    done = 0

    def link(source: Path, target: Path) -> None:
        nonlocal done
        if done == moves:
            raise KeyboardInterrupt
        done += 1
        store.link_folder(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(update, "link_folder", link)
        with pytest.raises(KeyboardInterrupt):
            STEPS[5](job)
    assert not job.store.has(1)
    forget()
    update._unpublished.clear()
    for step in STEPS:
        step(job)
    assert outputs(job.work_root, 1) == outputs(unbroken_tree, 1)


def test_a_published_iteration_comes_back_from_its_steps(prepared: MakeJob, unbroken_tree: Path) -> None:
    """Killed after publishing and before DVC recorded it: DVC removes the outputs, and nothing is computed again."""
    job = prepared()
    for step in STEPS:
        step(job)
    for folder in (job.store.policy(1), job.store.training_state(1), job.store.replay):
        shutil.rmtree(folder)
    forget()
    with pytest.MonkeyPatch.context() as broken:
        for module, name in REPEATABLE:
            broken.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was repeated"))
        for step in STEPS:
            step(job)
    assert outputs(job.work_root, 1) == outputs(unbroken_tree, 1)


def test_what_is_published_does_not_change_with_its_steps(prepared: MakeJob, unbroken_tree: Path) -> None:
    """Both may be the same file on disk; DVC replaces its own by links into its cache, never writing into them."""
    job = prepared()
    for step in STEPS:
        step(job)
    shutil.rmtree(job.scratch)
    assert outputs(job.work_root, 1) == outputs(unbroken_tree, 1)


def test_publishing_replaces_an_older_iteration_whole(unbroken: MakeJob) -> None:
    """Other settings, same number: the new folder takes the place of the old one, nothing of it stays."""
    job = unbroken(training={"dpo_beta": 0.9})
    old = job.store.manifest(1)
    (job.store.policy(1) / "left-over.txt").write_text("old")
    (job.store.training_state(1) / "left-over.txt").write_text("old")
    for step in STEPS:
        step(job)
    manifest = job.store.manifest(1)
    assert manifest.inputs != old.inputs and manifest.policy != old.policy
    assert not list(job.work_root.rglob("left-over.txt"))
    assert not list(job.store.models.glob(".*")) and not list(job.store.state.glob(".*"))


def test_the_manifest_ties_an_iteration_to_its_past(unbroken: MakeJob) -> None:
    job = unbroken()
    first, second = job.store.manifest(1), job.store.manifest(2)
    assert first.previous == manifest_digest(job.store, 0)
    assert second.previous == manifest_digest(job.store, 1)
    assert [entry.iteration for entry in second.history] == [1, 2]
    verify_history(job.store, second)
    for number, manifest in ((1, first), (2, second)):
        progress = read_json(job.store.training_state(number) / "progress.json")
        assert progress["environment_steps"] == manifest.environment_steps


def test_environment_steps_count_trained_answers(unbroken: MakeJob) -> None:
    job = unbroken()
    rows = [row for number in (1, 2) for row in update.update_metrics(job, number)]
    pairs = sum(entry.num_pairs for entry in job.store.manifest(2).history)
    assert rows[-1]["environment_steps"] == job.store.manifest(2).environment_steps == 2 * pairs
    assert [row["iteration"] for row in rows] == sorted(row["iteration"] for row in rows)
    assert update.update_metrics(job, 9) == []


def test_after_publishing_the_trained_team_is_kept(prepared: MakeJob) -> None:
    job = prepared()
    for step in STEPS:
        step(job)
    assert is_live(job, 1)
    assert live(job, 1).team.fingerprint() == job.store.manifest(1).policy


def test_fresh_moments_every_iteration_on_request(prepared: MakeJob, run_iteration: Callable[[Job, int], None]) -> None:
    """A team from memory and one from its files must go on alike under both settings of the optimizer's state."""
    results = {}
    for kept in (True, False):
        job = prepared(training={"optimizer_state": "reset"})
        for iteration in (1, 2):
            run_iteration(job, iteration)
            if not kept:
                forget()
        results[kept] = outputs(job.work_root, 2)
    assert results[True] == results[False]
    assert not any("engine_" in name for name in results[True])


def test_no_pairs_leave_the_weights_alone(
    tmp_path: Path, prepared: MakeJob, run_iteration: Callable[[Job, int], None]
) -> None:
    (tmp_path / "mine.py").write_text("def score(first, second):\n    return [0.5] * len(first)\n")
    job = prepared(reward={"function": "mine.py:score"})
    for iteration in (1, 2):
        run_iteration(job, iteration)
    assert job.store.manifest(2).policy == job.store.manifest(0).policy
    assert job.store.manifest(2).environment_steps == 0
    assert update.update_metrics(job, 2) == []
    assert (job.store.policy(2) / MANIFEST).is_file()
