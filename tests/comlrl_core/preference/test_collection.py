"""Collection: who answers what, from which streams, in how many calls."""

import pytest

from comlrl_core import progress
from comlrl_core.comparators.current import current
from comlrl_core.comparators.current_copy import current_copy
from comlrl_core.errors import DataError
from comlrl_core.preference.collection import collect
from comlrl_core.randomness import stream_key
from comlrl_core.team import team as team_module
from comlrl_core.team.generation import Sampling, generate
from comlrl_core.team.team import Team, load_team

TASKS = [{"task_id": f"t{i}", "prompt": f"sentence {i}.", "extra": i} for i in range(3)]
SETTINGS = {"num_candidates": 3, "sampling": Sampling(max_new_tokens=5), "seed": 4, "iteration": 2}


@pytest.fixture(scope="module")
def team() -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, formatters=["[1] {prompt}", "[2] {prompt}"], seed=1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Every call of the generator: its model, number of prompts and keys."""
    made: list[dict] = []

    def counted(model, prompt_ids, **settings):
        made.append({"model": model, "prompts": len(prompt_ids), **settings})
        return generate(model, prompt_ids, **settings)

    monkeypatch.setattr(team_module, "generate", counted)
    return made


def test_both_sides_answer_every_task(team: Team) -> None:
    found = collect(team, current(team), TASKS, comparator_num_candidates=2, **SETTINGS)
    assert [task.task_id for task in found] == ["t0", "t1", "t2"]
    for task, row in zip(found, TASKS, strict=True):
        assert task.row == row and task.row is not row
        assert task.prompts == (f"[1] {row['prompt']}", f"[2] {row['prompt']}")
        assert [(joint.index, joint.source) for joint in task.current] == [(i, "current") for i in range(3)]
        assert [joint.index for joint in task.comparator] == [0, 1]
        for joint in task.responses:
            assert joint.reward is None and len(joint.completions) == 2
            for agent, completion in enumerate(joint.completions):
                assert completion.text == team.decode(completion.token_ids, agent)
                assert completion.finished == (completion.token_ids[-1] in team.agents[agent].eos_ids)
                assert 1 <= len(completion.token_ids) <= 5


def test_the_comparators_answers_carry_its_policy(team: Team) -> None:
    found = collect(team, current_copy(team, None), TASKS, **SETTINGS)
    assert {joint.source for task in found for joint in task.comparator} == {"current_copy"}
    assert all(len(task.comparator) == 3 for task in found)


def test_the_comparator_draws_from_a_stream_of_its_own(team: Team) -> None:
    found = collect(team, current(team), TASKS, **SETTINGS)
    assert all(
        mine.texts != theirs.texts for task in found for mine, theirs in zip(task.current, task.comparator, strict=True)
    )
    alone = collect(team, None, TASKS, **SETTINGS)
    assert [task.current for task in alone] == [task.current for task in found]
    assert all(task.comparator is None for task in alone)


def test_every_sample_has_a_stream_by_its_name(team: Team, calls: list[dict]) -> None:
    collect(team, current(team), TASKS, **SETTINGS)
    for call, (stage, agent) in zip(
        calls, [("collect", 0), ("collect", 1), ("compare", 0), ("compare", 1)], strict=True
    ):
        expected = [[stream_key(4, 2, stage, f"t{t}", agent, k) for k in range(3)] for t in range(3)]
        assert call["keys"] == expected


def test_how_tasks_are_grouped_changes_no_answer(team: Team) -> None:
    together = collect(team, current(team), TASKS, **SETTINGS)
    one_by_one = [collect(team, current(team), [task], **SETTINGS)[0] for task in TASKS]
    assert one_by_one == together
    assert collect(team, current(team), TASKS, tokens_per_batch=40, **SETTINGS) == together


def test_another_iteration_or_seed_answers_otherwise(team: Team) -> None:
    first = collect(team, None, TASKS, **SETTINGS)
    assert collect(team, None, TASKS, **{**SETTINGS, "iteration": 3}) != first
    assert collect(team, None, TASKS, **{**SETTINGS, "seed": 5}) != first


def test_one_generation_per_agent_and_side(team: Team, calls: list[dict]) -> None:
    """64 tasks, 2 agents, both sides: 4 calls of the generator, each for all tasks."""
    tasks = [{"task_id": str(i), "prompt": f"task {i}"} for i in range(64)]
    settings = {**SETTINGS, "num_candidates": 2, "sampling": Sampling(max_new_tokens=2)}
    collect(team, current(team), tasks, **settings)
    assert [call["prompts"] for call in calls] == [64] * 4
    assert [call["model"] for call in calls] == team.models * 2


def test_a_released_comparator_answers_nothing(team: Team) -> None:
    comparator = current_copy(team, None)
    comparator.release()
    with pytest.raises(ValueError, match="released"):
        collect(team, comparator, TASKS, **SETTINGS)


def test_a_row_without_the_prompts_field_is_named(team: Team) -> None:
    with pytest.raises(DataError, match=r"'prompt'.*'t9'"):
        collect(team, None, [{"task_id": "t9", "text": "x"}], **SETTINGS)


def test_a_long_collection_shows_its_progress(team: Team, monkeypatch, capsys) -> None:
    """A collection of more than two seconds draws its bar, and goes on."""
    monkeypatch.setenv("COMLRL_PROGRESS", "1")
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    collect(team, current(team), TASKS, **SETTINGS)
    shown = capsys.readouterr().err
    assert "collect: answers" in shown and "compare: answers" in shown and "/18" in shown
