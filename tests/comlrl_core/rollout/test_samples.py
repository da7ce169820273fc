"""From trees to samples: advantages by hand, the divergence in each agent's own return, dropped responses."""

import math
from dataclasses import replace

import pytest
import torch

from comlrl_core.rl.kl import sequence_kl
from comlrl_core.rollout.samples import Credit, node_samples
from comlrl_core.rollout.transition import Transition
from comlrl_core.rollout.tree import TreeShape, grow
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scoring import score_completions

PLAIN = Credit(advantage_normalization=False)


def collected(team, levels, credit=PLAIN, **arguments):
    return node_samples(team, levels, credit, **{"temperature": 1.0, "max_new_tokens": 4, **arguments})


def rolled(team, tasks, sampling, scorer, **shape):
    transition = shape.pop("transition", None)
    return grow(team, scorer, tasks, TreeShape(**shape), sampling=sampling, stream=(0, "test"), transition=transition)


def test_a_sample_holds_the_ids_that_were_sampled(team, tasks, sampling, scorer) -> None:
    levels = rolled(team, tasks, sampling, scorer([0.0, 1.0, 2.0] * 2), num_generations=3)
    found = collected(team, levels, version=7)
    assert len(found.samples) == 2 and found.joint_responses == 6
    for sample, node in zip(found.samples, levels[0], strict=True):
        assert (sample.turn, sample.version) == (1, 7)
        assert sample.completions == tuple(tuple(a.token_ids for a in of_agent) for of_agent in node.answers)
        for agent, prompt in enumerate(node.own_prompts):
            assert list(sample.prompts[agent]) == team.encode(prompt, agent, 4)
        assert sample.advantages == ((-1.0, 0.0, 1.0),) * 2


def test_nodes_come_task_by_task_and_turn_by_turn(team, tasks, sampling, scorer, echo) -> None:
    levels = rolled(
        team, tasks, sampling, scorer(range(12)), num_generations=2, num_turns=2, transition=Transition(echo)
    )
    assert [sample.turn for sample in collected(team, levels).samples] == [1, 2, 2, 1, 2, 2]


def test_metrics_by_hand(team, tasks, sampling, scorer, echo) -> None:
    """First turn 1, 3; second turn 10, 20 and 30, 30: returns 1 + 15, 3 + 30."""
    levels = rolled(
        team, tasks[:1], sampling, scorer([1.0, 3.0, 10, 20, 30, 30]), num_generations=2, num_turns=2,
        transition=Transition(echo),
    )  # fmt: skip
    metrics = collected(team, levels).metrics
    assert metrics["turn_1/reward_mean"] == 2.0 and metrics["turn_1/expected_return"] == (16 + 33) / 2
    assert metrics["turn_2/reward_mean"] == metrics["turn_2/expected_return"] == 22.5
    assert (metrics["turn_1/nodes"], metrics["turn_2/joint_responses"]) == (1.0, 4.0)
    assert metrics["frac_zero_std"] == pytest.approx(1 / 3) and metrics["dropped"] == 0.0
    assert "kl/agent_1" not in metrics


def test_a_divergence_at_step_0_in_the_thousands(tasks, sampling, scorer) -> None:
    """Pitfall 10: exactly 0 for a copy of the team, with dropout in the model, at any temperature, in any batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from comlrl_core.team.team import load_team
    from comlrl_core.team.tiny import tiny_tokenizer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=96, n_embd=32, n_layer=2, n_head=2, eos_token_id=1))
    team = load_team(agents=[model.train()], tokenizer=tiny_tokenizer())
    levels = rolled(team, tasks, Sampling(6, temperature=0.7), scorer([0.0, 1.0] * 2), num_generations=2)
    for batch_size in (None, 1):
        found = collected(
            team, levels, replace(PLAIN, kl_coef=0.1), reference=team.copy(), temperature=0.7, batch_size=batch_size
        )
        assert found.metrics["kl/agent_1"] == 0.0
        assert [sample.advantages for sample in found.samples] == [((-0.5, 0.5),)] * 2


@pytest.fixture
def drifted(team):
    """A reference that differs from the first agent alone."""
    reference = team.copy()
    with torch.no_grad():
        for parameter in reference.models[0].parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return reference


def divergence(team, reference, agent, prompt, completion, temperature):
    scored = [
        score_completions(t.models[agent], [prompt], [completion], pad_id=0, temperature=temperature)
        for t in (team, reference)
    ]
    (own, mask), (other, _) = scored
    return sequence_kl(own, other, mask).item()


@torch.no_grad()
def test_each_agent_pays_for_its_own_divergence_before_the_baseline(team, drifted, tasks, sampling, scorer) -> None:
    """Returns 0 and 1 minus 0.5 times the divergence d of each completion: advantages -+(1 - 0.5 (d1 - d0)) / 2."""
    levels = rolled(team, tasks[:1], sampling, scorer([0.0, 1.0]), num_generations=2)
    found = collected(team, levels, replace(PLAIN, kl_coef=0.5), reference=drifted)
    sample = found.samples[0]
    d0, d1 = (divergence(team, drifted, 0, sample.prompts[0], c, 1.0) for c in sample.completions[0])
    assert d0 > 0 and d1 > 0 and d0 != pytest.approx(d1)
    half = (1 - 0.5 * (d1 - d0)) / 2
    assert sample.advantages[0] == pytest.approx((-half, half), abs=1e-5)
    assert sample.advantages[1] == (-0.5, 0.5)  # the second agent has not moved
    assert found.metrics["kl/agent_1"] == pytest.approx((d0 + d1) / 2, abs=1e-5)
    assert found.metrics["kl/agent_2"] == 0.0
    assert found.metrics["turn_1/expected_return"] == 0.5  # reward and divergence apart


@torch.no_grad()
def test_in_cross_mode_the_divergence_is_subtracted_once(team, drifted, tasks, sampling, scorer) -> None:
    """Credits 3, 8 of agent 0 (see rl/test_returns.py) minus the divergence once each, then centred."""
    levels = rolled(team, tasks[:1], sampling, scorer([1.0, 2.0, 3.0, 5.0]), num_generations=2, joint_mode="cross")
    found = collected(team, levels, replace(PLAIN, joint_mode="cross", kl_coef=1.0), reference=drifted)
    sample = found.samples[0]
    d0, d1 = (divergence(team, drifted, 0, sample.prompts[0], c, 1.0) for c in sample.completions[0])
    half = (8 - d1 - (3 - d0)) / 2
    assert sample.advantages[0] == pytest.approx((-half, half), abs=1e-5)
    assert sample.advantages[1] == (-1.5, 1.5)  # 4, 7


def test_the_divergence_does_not_pass_to_the_node_above(team, drifted, tasks, sampling, scorer, echo) -> None:
    levels = rolled(
        team, tasks[:1], sampling, scorer([0.0, 1.0, 0, 4, 2, 6]), num_generations=2, num_turns=2,
        transition=Transition(echo),
    )  # fmt: skip
    raw = replace(PLAIN, advantage_mode="raw")
    free = collected(team, levels, raw).samples[0].advantages[0]
    paid = collected(team, levels, replace(raw, kl_coef=1.0), reference=drifted)
    first = paid.samples[0]
    assert free == (2.0, 5.0)
    with torch.no_grad():
        own = [divergence(team, drifted, 0, first.prompts[0], c, 1.0) for c in first.completions[0]]
    assert first.advantages[0] == pytest.approx((2.0 - own[0], 5.0 - own[1]), abs=1e-5)


def test_dropped_responses_leave_the_baseline_and_whole_nodes_the_update(team, tasks, sampling, scorer) -> None:
    """1, (dropped), 3 have mean 2; the second task's rewards are all dropped."""
    levels = rolled(team, tasks, sampling, scorer([1.0, None, 3.0, None, None, None]), num_generations=3)
    found = collected(team, levels)
    assert [sample.advantages for sample in found.samples] == [((-1.0, None, 1.0),) * 2]
    assert found.metrics["dropped"] == 4.0 and found.metrics["turn_1/reward_mean"] == 2.0
    assert found.joint_responses == 6


def test_k_equal_returns_give_no_advantage_and_are_counted(team, tasks, sampling, scorer) -> None:
    levels = rolled(team, tasks, sampling, scorer([0.1] * 3 + [0.0, 0.5, 1.0]), num_generations=3)
    found = collected(team, levels, Credit())
    assert found.samples[0].advantages == ((0.0,) * 3,) * 2 and found.samples[0].zero_std == (True, True)
    assert found.samples[1].advantages[0][2] == pytest.approx(math.sqrt(1.5))  # 0.5 over sqrt(0.5 / 3)
    assert found.metrics["frac_zero_std"] == 0.5
