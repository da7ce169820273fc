"""Probes: which tasks they answer, that they move nothing, and the alarm."""

import pytest
import torch

from comlrl_core.algorithms import marlhf, probing
from comlrl_core.algorithms.marlhf_config import MARLHFIterConfig
from comlrl_core.algorithms.shared import make_engines
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import ProbeSample, open_reward_model
from comlrl_core.preference.reward_model.diagnostics import is_held_out
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.team import Team, load_team

torch.set_num_threads(1)

TINY = "builtin:tiny"
TASKS = [{"task_id": f"t{n}", "prompt": f"the {word} bird."} for n, word in enumerate(("red", "old", "shy", "big"))]


def lengths(first: list[str], second: list[str]) -> list[float]:
    return [float(len(b) - len(a)) for a, b in zip(first, second, strict=True)]


def config(**changes) -> MARLHFIterConfig:
    settings = {
        "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": None, "num_generations": 2,
        "num_train_epochs": 1, "agent_learning_rate": 1e-3, "reward_learning_rate": 1e-3, "reward_probe_samples": 4,
        "reward_eval_fraction": 0.0,
    }  # fmt: skip
    return MARLHFIterConfig(**{**settings, **changes})


@pytest.fixture
def team() -> Team:
    return load_team(agent_model=TINY, num_agents=2, formatters="{prompt}\n")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(lengths, 2)


@pytest.fixture
def records() -> list[PairRecord]:
    return [
        PairRecord(
            prompts=(f"{task['prompt']}\n",) * 2,
            winner_completions=("a", "the bird sings."),
            loser_completions=("a", "b"),
            winner_reward=14.0,
            loser_reward=0.0,
            candidate_reward_mean=7.0,
            task_id=task["task_id"],
        )
        for task in TASKS
    ]


def test_probes_answer_tasks_that_the_model_was_not_fitted_to() -> None:
    tasks = [{"task_id": f"task {n}", "prompt": "a"} for n in range(200)]
    chosen = probing.probe_tasks(config(reward_eval_fraction=0.1, reward_probe_samples=64), tasks)
    assert chosen is not None
    assert all(is_held_out(task["task_id"], 0.1) for task in chosen.tasks)
    assert 64 <= len(chosen.tasks) * chosen.samples_per_task < 64 + len(chosen.tasks)
    everything = probing.probe_tasks(config(reward_eval_fraction=0.0, reward_probe_samples=3), TASKS)
    assert everything is not None
    assert (len(everything.tasks), everything.samples_per_task) == (3, 1)
    assert probing.probe_tasks(config(reward_probe_samples=0), TASKS) is None


def test_probing_more_or_less_changes_no_weight(oracle, records) -> None:
    prints = set()
    for samples in (0, 8):
        team = load_team(agent_model=TINY, num_agents=2, formatters="{prompt}\n")
        args = config(reward_probe_samples=samples)
        marlhf.learn(team, make_engines(team, args), TASKS, records, oracle, args, iteration=1, source=TINY)
        prints.add(team.fingerprint())
    assert len(prints) == 1


def test_the_alarm_is_raised_when_the_learned_reward_rises_and_the_task_reward_falls(
    team, oracle, monkeypatch, caplog
) -> None:
    """Pitfall 24, seen from an iteration: the two probes are compared, and the run hears it."""
    means = ((0.0, 0.9), (2.0, 0.4))
    sides = [[ProbeSample(f"t{n}", 0, learned + n, task) for n in range(6)] for learned, task in means]
    monkeypatch.setattr(probing, "probe", lambda *_, **__: sides.pop(0))
    with probing.probing(team, open_reward_model(TINY, 2), oracle, TASKS, config(), 3) as probes:
        pass
    assert probes.metrics["reward_model/alarm"] == 1.0
    assert probes.metrics["reward_model/learned_reward_change"] == pytest.approx(2.0)
    assert probes.metrics["reward_model/oracle_reward_change"] == pytest.approx(-0.5)
    assert "iteration 3: the reward model is being exploited" in caplog.text


def test_probe_scores_the_same_answers_with_both(team, oracle) -> None:
    args = config()
    model = open_reward_model(TINY, 2)
    chosen = probing.probe_tasks(args, TASKS)
    assert chosen is not None
    first = probing.probe(team, model, oracle, chosen, args, iteration=1)
    assert first == probing.probe(team, model, oracle, chosen, args, iteration=1)
    assert [s.oracle for s in first] != [
        s.oracle for s in probing.probe(team, model, oracle, chosen, args, iteration=2)
    ]
    assert len(first) == 4 and len({sample.learned for sample in first}) > 1
