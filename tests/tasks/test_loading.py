from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.errors import ConfigError
from tasks import loading
from tasks.job import Job
from tasks.loading import comparator, forget, formatters, initial_team, is_live, live, policy, take
from tasks.oracle import oracle

MakeJob = Callable[..., Job]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of policies that are read."""
    read: list[str] = []
    load = loading.load_team_folder

    def counted(folder: Path, *args: Any) -> Any:
        read.append(folder.name)
        return load(folder, *args)

    monkeypatch.setattr(loading, "load_team_folder", counted)
    return read


def test_the_team_is_read_once_and_kept(unbroken: MakeJob, loads: list[str]) -> None:
    job = unbroken()
    first = live(job, 1)
    assert live(job, 1) is first and is_live(job, 1) and not is_live(job, 2)
    assert loads == ["iteration_0001"]
    live(job, 2)  # one team at a time: they are large
    assert not is_live(job, 1)
    forget()
    assert not is_live(job, 2)


def test_the_stages_of_a_run_do_not_read_again_what_the_stage_before_left(
    prepared: MakeJob, run_iteration: Callable[[Job, int], None], monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    """For training the initial team is read, and never another; old teams are read to be compared with."""
    job = prepared()
    restored: list[str] = []
    restore = loading.load_training_state
    monkeypatch.setattr(
        loading, "load_training_state", lambda folder, *rest: restored.append(folder.name) or restore(folder, *rest)
    )
    run_iteration(job, 1)
    assert "iteration_0001" not in loads
    run_iteration(job, 2)
    assert restored == ["iteration_0000"]
    assert "iteration_0002" not in loads


def test_a_taken_team_is_nobody_elses(unbroken: MakeJob) -> None:
    job = unbroken()
    taken = take(job, 1)
    assert not is_live(job, 1)
    assert live(job, 1) is not taken


def test_a_replaced_policy_is_not_mistaken_for_the_kept_one(unbroken: MakeJob) -> None:
    job = unbroken()
    live(job, 1)
    manifest = job.store.policy(1) / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert not is_live(job, 1)


def test_the_live_team_is_where_training_stopped(unbroken: MakeJob) -> None:
    job = unbroken()
    left = live(job, 2)
    assert left.environment_steps == job.store.manifest(2).environment_steps > 0
    assert left.team.fingerprint() == job.store.manifest(2).policy
    assert all(p.requires_grad for model in left.team.unique_models for p in model.parameters())


def test_policies_to_compare_with_are_frozen(unbroken: MakeJob) -> None:
    job = unbroken()
    team = policy(job, 1)
    assert team.fingerprint() == job.store.manifest(1).policy
    assert not any(p.requires_grad for model in team.unique_models for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "version", "weights_of"),
    [
        ({}, "current", 1),
        ({"comparator_policy": "current_copy"}, "current", 1),
        ({"comparator_policy": "history"}, "iteration_0000", 0),
        ({"comparator_policy": "model", "comparator_model_name": "builtin:tiny"}, "builtin:tiny", None),
    ],
)
def test_the_other_side_is_what_the_settings_name(
    unbroken: MakeJob, settings: dict[str, Any], version: str, weights_of: int | None
) -> None:
    job = unbroken(training=settings)
    other = comparator(job, 2)
    assert other is not None and other.team is not None
    assert other.version == version
    assert (other.team is live(job, 1).team) == (not settings)
    if weights_of is not None:
        assert other.team.fingerprint() == job.store.manifest(weights_of).policy


def test_the_offline_algorithm_has_no_other_side(prepared: MakeJob) -> None:
    assert comparator(prepared(algorithm="madpo", num_iterations=1), 1) is None


def test_the_oracle_is_the_projects_own(tmp_path: Path, prepared: MakeJob) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(first, second, word='a'):\n    return [float(word in a + b) for a, b in zip(first, second)]\n"
        "def half(reward):\n    return reward / 2\n"
    )
    reward = {"function": "mine.py:score", "kwargs": {"word": "x"}, "processor": "mine.py:half"}
    judge = oracle(prepared(reward=reward))
    scored = judge.score([["x", "a"], ["b", "b"]], [{"task_id": "1"}, {"task_id": "2"}], ["p", "p"])
    assert [(s.raw, s.processed) for s in scored] == [(1.0, 0.5), (0.0, 0.0)]
    assert "mine.py:score@" in judge.label


def test_an_oracle_for_another_number_of_agents_is_refused(prepared: MakeJob) -> None:
    job = prepared(training={"num_agents": 3}, team={"templates": None})
    with pytest.raises(ConfigError, match="3 list"):
        oracle(job)


def test_prompts_come_from_templates_or_from_a_function(tmp_path: Path, prepared: MakeJob) -> None:
    row = {"prompt": "hello", "task_id": "t"}
    team = initial_team(prepared(team={"templates": ["a {prompt}", "b {prompt}"]}))
    assert team.prompts(row) == ("a hello", "b hello")
    (tmp_path / "mine.py").write_text("def prompt(row):\n    return row['prompt'].upper()\n")
    job = prepared(team={"templates": None, "formatter": "mine.py:prompt"})
    assert len(formatters(job)) == 2
    assert initial_team(job).prompts(row) == ("HELLO", "HELLO")


def test_a_model_folder_is_looked_for_in_the_project(tmp_path: Path, unbroken: MakeJob) -> None:
    job = unbroken(team={"agent_model": "models/iteration_0002/agent_0"})
    assert loading.model_source(job, "models/iteration_0002/agent_0") == str(tmp_path / "models/iteration_0002/agent_0")
    assert loading.model_source(job, "builtin:tiny") == "builtin:tiny"
    assert loading.model_source(job, "org/name") == "org/name"
    assert initial_team(job).num_agents == 2
