"""The loop of MAAC and IAC: gradients, steps, whole episodes, values that converge, and actors that go on learning."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from comlrl_core.algorithms.actor_critic import (
    ActorCriticSettings,
    actor_critic,
    actor_critic_epoch,
    normalised,
    train_minibatch,
)
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.critics.building import CriticPlan, build_critics
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.local import build_engines
from comlrl_core.engine.protocol import Engine, OptimizerSettings
from comlrl_core.errors import ConfigError, TrainingError
from comlrl_core.rewards.contract import Oracle, Scored
from comlrl_core.rl.logprobs import sequence_logprobs
from comlrl_core.rollout.episodes import EpisodeSample, Lesson, TemporalDifference
from comlrl_core.rollout.transition import Transition
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scoring import score_completions
from comlrl_core.team.team import Team, load_team

torch.set_num_threads(1)

TASKS = [{"task_id": name, "prompt": f"the {name} bird."} for name in ("red", "old", "small")]
SAMPLING = Sampling(max_new_tokens=4)
FORMATTERS = ["[1] {prompt}\n", "[2] {prompt}\n"]


class Setting:
    """A team with engines and critics."""

    def __init__(self, central: bool, separate: bool = True, agents: int = 2, rate: float = 1e-3, critic_rate=1e-3):
        self.team: Team = load_team(agent_model="builtin:tiny", num_agents=agents, formatters=FORMATTERS[:agents])
        self.engines: list[Engine] = build_engines(self.team.models, OptimizerSettings(rate))
        plan = CriticPlan(central, separate, None, None, seed=0)
        sources = ["builtin:tiny"] * (plan.count(agents) if separate else 0)
        self.critics = build_critics(self.team, self.engines, plan, OptimizerSettings(critic_rate), sources)

    def weights(self) -> list[torch.Tensor]:
        modules = [*self.team.models, *(critic.modules[0] for critic in self.critics.critics)]
        return [p.detach().clone() for module in modules for p in module.parameters()]


def settings(**changes: Any) -> ActorCriticSettings:
    values = {"sampling": SAMPLING, "seed": 1, "rule": TemporalDifference(), **changes}
    return ActorCriticSettings(**values)


def sample(setting: Setting, seed: int, advantage: float | None = None, target: float = 1.0, turn: int = 1):
    """A random sample; the critics' old value is 0."""
    random = torch.Generator().manual_seed(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 60, (length,), generator=random).tolist())

    count = setting.team.num_agents
    weight = float(torch.randn((), generator=random)) if advantage is None else advantage
    return EpisodeSample(
        turn=turn,
        version=0,
        prompts=tuple(ids(3 + seed % 3) for _ in range(count)),
        completions=tuple((ids(2 + seed % 2),) for _ in range(count)),
        advantages=((weight,),) * count,
        zero_std=(False,) * count,
        lessons=tuple(Lesson((ids(5 + seed % 4),), (0.0,), ((target,),)) for _ in setting.critics.critics),
    )


def constant(*numbers: float) -> Oracle:
    iterator = iter(numbers)
    return Oracle(lambda *texts: [next(iterator) for _ in texts[0]], 2)


def again(prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None):
    return [f"{prompt} again" for _ in range(num_agents)]


@pytest.mark.parametrize(("central", "separate"), [(True, True), (False, True), (False, False)])
def test_gradients_by_autograd(central: bool, separate: bool) -> None:
    """Actors: - mean A log pi. Critics: coef * mean (V - target)^2. A shared backbone has the sum of both."""
    setting = Setting(central, separate)
    samples = [sample(setting, seed, target=0.5 * seed) for seed in range(4)]
    chosen = settings(value_loss_coef=0.6)
    steps: list[Engine] = []
    for engine in [*setting.engines, *setting.critics.engines]:
        engine.step = lambda engine=engine: (steps.append(engine), _result())[1]  # type: ignore[method-assign]
    metrics, nonfinite = train_minibatch(setting.team, setting.engines, setting.critics, samples, chosen)
    assert not nonfinite
    found = [[p.grad.clone() for p in e.model.parameters() if p.grad is not None] for e in steps]
    assert len(steps) == 2 + len(setting.critics.critics)  # each of them once

    for engine in steps:
        engine.model.zero_grad()
    losses = []
    for agent, model in enumerate(setting.team.models):
        prompts, completions = [s.prompts[agent] for s in samples], [s.completions[agent][0] for s in samples]
        logprobs = sequence_logprobs(*score_completions(model, prompts, completions, pad_id=0))
        weights = torch.tensor([s.advantages[agent][0] for s in samples])
        losses.append(-(weights * logprobs).mean())
    values = []
    for index, critic in enumerate(setting.critics.critics):
        inputs = [s.lessons[index].inputs[0] for s in samples]
        aims = torch.tensor([s.lessons[index].targets[0][0] for s in samples])
        own: list[torch.Tensor] = []
        for ids in inputs:
            row, mask = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)
            if separate:
                own.append(critic.modules[0](row, mask))
            else:
                hidden = critic.backbone(input_ids=row, attention_mask=mask.long()).last_hidden_state[:, -1]
                own.append(critic.head(hidden).squeeze(-1))
        values.append((torch.cat(own) - aims).square().mean())
    (sum(losses) + 0.6 * sum(values)).backward()
    for engine, gradients in zip(steps, found, strict=True):
        expected = [p.grad for p in engine.model.parameters() if p.grad is not None]
        assert len(expected) == len(gradients) > 0
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(torch.stack(values).mean().item(), rel=1e-5)
    assert metrics["advantage_mean"] == pytest.approx(sum(s.advantages[0][0] for s in samples) / 4)


def _result():
    from comlrl_core.engine.protocol import StepResult

    return StepResult(1.0, 1e-3, False)


@pytest.mark.parametrize(("central", "separate"), [(True, True), (False, False)])
def test_micro_batches_are_one_batch(central: bool, separate: bool) -> None:
    moved = []
    for size in (None, 1, 3):
        setting = Setting(central, separate)
        samples = [sample(setting, seed) for seed in range(5)]
        train_minibatch(setting.team, setting.engines, setting.critics, samples, settings(micro_batch_size=size))
        moved.append(setting.weights())
    for other in moved[1:]:
        for one, two in zip(moved[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)


def test_clipped_values_do_not_move_far() -> None:
    """Old value 0, range 0.01: V is further than that on the way to its target, so the loss has no slope."""
    setting = Setting(central=False, separate=False)
    with torch.no_grad():
        for critic in setting.critics.critics:
            critic.head.layers[-1].bias.fill_(0.5)
    lessons = [sample(setting, seed, advantage=0.0, target=1.0) for seed in range(3)]
    before = setting.weights()
    train_minibatch(setting.team, setting.engines, setting.critics, lessons, settings(value_clip_range=0.01))
    assert all(torch.equal(one, two) for one, two in zip(before, setting.weights(), strict=True))
    train_minibatch(setting.team, setting.engines, setting.critics, lessons, settings())
    assert any(not torch.equal(one, two) for one, two in zip(before, setting.weights(), strict=True))


def test_advantages_are_normalised_turn_by_turn() -> None:
    """Turn 1: 1, 3 and 8, mean 4, deviation sqrt(26 / 3). Turn 2: 5 alone, which stays."""
    setting = Setting(central=True)
    given = [sample(setting, s, a, turn=t) for s, (a, t) in enumerate([(1.0, 1), (5.0, 2), (3.0, 1), (8.0, 1)])]
    found = normalised(given)
    deviation = math.sqrt(26 / 3)
    expected = [-3 / deviation, 5.0, -1 / deviation, 4 / deviation]
    for agent in (0, 1):
        assert [s.advantages[agent][0] for s in found] == pytest.approx(expected, abs=1e-12)
    assert [s.turn for s in found] == [1, 2, 1, 1]


@pytest.mark.parametrize("turns", [1, 2])
def test_no_update_between_the_turns_of_an_episode(turns: int) -> None:
    """A buffer of three nodes: with episodes of two turns it is emptied at four nodes, and at the end of the epoch."""
    setting = Setting(central=True)
    sizes: list[tuple[int, int]] = []
    learned = actor_critic_epoch(
        setting.team,
        setting.engines,
        setting.critics,
        TASKS,
        constant(*range(100)),
        settings(num_turns=turns, rollout_buffer_size=3),
        transition=Transition(again) if turns == 2 else None,
        hooks=Hooks(on_step=lambda metrics, steps: sizes.append((metrics["turn"], metrics["nodes"]))),
    )
    assert sizes == ([(1, 3)] if turns == 1 else [(1, 2), (2, 2), (1, 1), (2, 1)])
    assert settings(num_turns=turns, rollout_buffer_size=3).steps_per_epoch(3) == len(sizes)
    assert learned.environment_steps == 3 * turns


def test_a_second_epoch_goes_on_where_the_first_ended() -> None:
    runs = []
    for parts in ([(0, 2)], [(0, 1), (1, 2)]):
        setting = Setting(central=True)
        learned = None
        for start, end in parts:
            learned = actor_critic(
                setting.team, setting.engines, setting.critics, TASKS, Oracle(lengths, 2), settings(),
                num_train_epochs=end, start_epoch=start, learned=learned,
            )  # fmt: skip
        runs.append((setting.weights(), learned))
    assert all(torch.equal(one, two) for one, two in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]


def lengths(*texts: Sequence[str]) -> list[float]:
    return [len(one) / 10 for one in texts[0]]


class ByTaskAndTurn:
    """A reward that the task and the turn decide, so that values are known."""

    def __init__(self, rewards: dict[tuple[str, int], float]) -> None:
        self.rewards = rewards

    def score(self, completions, batch_items, prompts):
        turns = [2 if "again" in str(prompt) else 1 for prompt in prompts]
        found = [self.rewards[row["task_id"], turn] for row, turn in zip(batch_items, turns, strict=True)]
        return [Scored(reward, reward, dropped=False) for reward in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("central", "separate", "critic_type"), [(True, True, "v"), (False, False, "v"), (True, True, "q")]
)
def test_values_converge_to_known_ones(central: bool, separate: bool, critic_type: str) -> None:
    """Two states, discount 0.5: V = 0.2 + 0.5 * 1.0 = 0.7, then 1.0; V = 0.6 + 0.5 * 0.4 = 0.8, then 0.4."""
    setting = Setting(central, separate, rate=1e-8 if separate else 3e-3, critic_rate=3e-3)
    rewards = {("red", 1): 0.2, ("red", 2): 1.0, ("old", 1): 0.6, ("old", 2): 0.4}
    worth = {("red", 1): 0.7, ("red", 2): 1.0, ("old", 1): 0.8, ("old", 2): 0.4}
    rule = TemporalDifference(critic_type, discount=0.5, q_baseline_samples=1)  # type: ignore[arg-type]
    values: list[float] = []
    # Where the backbone is the actor's, its policy is held still, so that values alone move it.
    chosen = settings(
        num_turns=2, rollout_buffer_size=4, rule=rule, advantage_normalization=False,
        sampling=Sampling(max_new_tokens=1, top_k=2),
    )  # fmt: skip
    seen: list[EpisodeSample] = []

    def on_step(metrics: dict[str, Any], steps: int) -> None:
        values.append(metrics["value_loss"])

    from comlrl_core.algorithms import actor_critic as module

    original = module.train_minibatch

    def train(team, engines, critics, samples, given):
        seen.extend(samples)
        still = samples if separate else [_without_advantages(s) for s in samples]
        return original(team, engines, critics, still, given)

    module.train_minibatch = train
    try:
        for epoch in range(220):
            seen.clear()
            actor_critic_epoch(
                setting.team, setting.engines, setting.critics, TASKS[:2], ByTaskAndTurn(rewards), chosen,
                epoch=epoch, transition=Transition(again), hooks=Hooks(on_step=on_step),
            )  # fmt: skip
            errors = [
                abs(lesson.old_values[0] - expected) / expected
                for one in seen
                for lesson in one.lessons
                for expected in [worth[_task_of(one, setting), one.turn]]
            ]
            if max(errors) < 0.02:
                return
    finally:
        module.train_minibatch = original
    raise AssertionError(f"after 220 epochs the values are still off by {max(errors):.1%}; last losses {values[-4:]}")


def _without_advantages(one: EpisodeSample) -> EpisodeSample:
    from dataclasses import replace

    return replace(one, advantages=((0.0,),) * len(one.advantages))


def _task_of(one: EpisodeSample, setting: Setting) -> str:
    text = setting.team.agents[0].tokenizer.decode(list(one.prompts[0]))
    return "red" if "red" in text else "old"


class PerfectCritic:
    """Knows the reward of a response: what a Q critic is when it has converged."""

    shares_backbone = False
    max_length = None

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.engine = build_engines([self.model], OptimizerSettings(1e-3))[0]
        self.modules = [self.model]
        self.texts: list[str] = []

    def encode(self, views):
        self.texts += [entry[0].history.responses[-1] for entry in views]
        return [(len(self.texts) - len(views) + index,) for index in range(len(views))]

    def values(self, inputs, tokens_per_batch=None):
        return [short(self.texts[index]) for (index,) in inputs]

    def backward(self, inputs, loss):
        found = torch.tensor(self.values(inputs), requires_grad=True)
        return loss(found).item()


def short(text: str) -> float:
    """1 for an empty response, 0 from eight characters on."""
    return max(0.0, 1.0 - len(text) / 8)


@pytest.mark.slow
def test_with_q_an_actor_learns_from_a_critic_that_has_converged() -> None:
    """The critic's error is 0 from the start: r - Q is 0 everywhere, and Q less its baseline is not."""
    setting = Setting(central=True, agents=1, rate=3e-3)
    critic = PerfectCritic()
    critics = Critics((critic,), True, 1)  # type: ignore[arg-type]
    oracle = Oracle(lambda texts: [short(text) for text in texts], 1)
    rewards: list[float] = []
    losses: list[float] = []
    learned = None
    tasks = [{"task_id": str(n), "prompt": f"{n} birds."} for n in range(24)]
    for epoch in range(30):
        learned = actor_critic_epoch(
            setting.team, setting.engines, critics, tasks, oracle,
            settings(rule=TemporalDifference("q"), rollout_buffer_size=12), epoch=epoch, learned=learned,
            hooks=Hooks(
                on_rollout=lambda metrics, steps: rewards.append(metrics["turn_1/reward_mean"]),
                on_step=lambda metrics, steps: losses.append(metrics["value_loss"]),
            ),
        )  # fmt: skip
    assert max(losses) < 1e-12
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_a_value_loss_that_is_not_finite_moves_nobody() -> None:
    setting = Setting(central=True)
    before = setting.weights()
    samples = [sample(setting, 1, target=math.inf), sample(setting, 2)]
    metrics, nonfinite = train_minibatch(setting.team, setting.engines, setting.critics, samples, settings())
    assert nonfinite == "loss" and metrics["skipped"] == 1 and metrics["nonfinite"] == 1
    assert all(torch.equal(one, two) for one, two in zip(before, setting.weights(), strict=True))
    with pytest.raises(TrainingError, match="not finite"):
        actor_critic(
            setting.team, setting.engines, setting.critics, TASKS, constant(1, 1, 1),
            settings(value_loss_coef=math.inf), num_train_epochs=1,
        )  # fmt: skip


def test_what_is_missing_is_refused() -> None:
    setting = Setting(central=True)
    ask = (setting.team, setting.engines, setting.critics, TASKS, constant(1))
    with pytest.raises(ConfigError, match="external_transition is required"):
        actor_critic_epoch(*ask, settings(num_turns=2))
    with pytest.raises(ConfigError, match="reference_kl_enabled needs"):
        actor_critic_epoch(*ask, settings(rule=TemporalDifference(kl_coef=0.1)))
    with pytest.raises(ConfigError, match="num_generations is 3"):
        settings(num_turns=2, num_generations=3)
    other = Setting(central=False, agents=1)
    with pytest.raises(ConfigError, match="critics are of 1 agents"):
        actor_critic_epoch(setting.team, setting.engines, other.critics, TASKS, constant(1), settings())
