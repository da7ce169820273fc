"""Evaluation samples by name of task and sample, and touches nothing."""

from dataclasses import replace

import pytest
import torch

from comlrl_core.evaluation import evaluate
from comlrl_core.evaluation.evaluate import EvaluatedSample, sample_from_json, sample_to_json
from comlrl_core.files import dump_json
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team, load_team

TASKS = [{"task_id": f"t{i}", "prompt": f"the {word} bird sings."} for i, word in enumerate(["red", "old", "small"])]
SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def team() -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=2, formatters=["[1] {prompt}", "[2] {prompt}"], seed=3)


def lengths(first, second, batch_items, prompts):
    assert all(isinstance(prompt, list) and len(prompt) == 2 for prompt in prompts)
    return [len(a) + len(b) / 100 for a, b in zip(first, second, strict=True)]


def run(team: Team, **changes) -> list[EvaluatedSample]:
    settings = {"samples_per_task": 2, "sampling": SAMPLING, "seed": 1, **changes}
    return evaluate(team, settings.pop("oracle", Oracle(lengths, 2)), settings.pop("tasks", TASKS), **settings)


def test_every_task_is_answered_and_scored(team: Team) -> None:
    found = run(team)
    assert [(s.task_id, s.sample) for s in found] == [(f"t{i}", k) for i in range(3) for k in range(2)]
    for one in found:
        assert one.characters == tuple(map(len, one.texts))
        assert one.reward == one.characters[0] + one.characters[1] / 100
        assert all(1 <= count <= 6 for count in one.tokens) and len(one.finished) == 2
    assert len({one.texts for one in found}) > 1


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_how_tasks_are_batched_changes_no_answer(team: Team, batch_size: int | None) -> None:
    assert run(team, batch_size=batch_size) == run(team)
    assert run(team, tasks=TASKS[1:2]) == [s for s in run(team) if s.task_id == "t1"]


def test_other_seeds_and_sides_answer_otherwise(team: Team) -> None:
    assert run(team, seed=2) != run(team)
    assert run(team, side="comparator") != run(team)


def test_evaluating_more_often_changes_the_trained_weights(team: Team) -> None:
    """Pitfall 20: neither the weights, nor the mode of the models, nor torch's own stream are touched."""
    before, state = team.fingerprint(), torch.get_rng_state()
    modes = [model.training for model in team.models]
    run(team)
    assert team.fingerprint() == before and torch.equal(torch.get_rng_state(), state)
    assert [model.training for model in team.models] == modes


def test_a_bad_reward_leaves_that_sample_out(team: Team) -> None:
    def second_is_bad(first, second):
        return [float("nan") if i == 1 else 2.0 for i in range(len(first))]

    found = run(team, oracle=Oracle(second_is_bad, 2, processor=lambda r: r / 2, on_bad_reward="drop"))
    assert [s.reward for s in found] == [1.0, None, 1.0, 1.0, 1.0, 1.0]


def test_greedy_answers_are_all_alike(team: Team) -> None:
    found = run(team, sampling=Sampling(max_new_tokens=4, temperature=0.0))
    assert all(a.texts == b.texts for a, b in zip(found[::2], found[1::2], strict=True))


def test_no_tasks_no_samples(team: Team) -> None:
    assert run(team, tasks=[]) == []


def test_samples_survive_a_file(team: Team) -> None:
    import json

    for one in [*run(team), replace(run(team)[0], reward=None)]:
        assert sample_from_json(json.loads(dump_json(sample_to_json(one), "sample"))) == one
