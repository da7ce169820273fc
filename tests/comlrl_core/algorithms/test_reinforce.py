"""The loop of the REINFORCE family: gradients, minibatches, ages, what is skipped, and what is refused."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from comlrl_core.algorithms.reinforce import (
    Hooks,
    ReinforceSettings,
    reinforce,
    reinforce_epoch,
    steps_per_epoch,
    train_minibatch,
)
from comlrl_core.algorithms.shared import Learned
from comlrl_core.engine.local import LocalEngine, build_engines
from comlrl_core.engine.protocol import Engine, OptimizerSettings, StepResult
from comlrl_core.errors import ConfigError, TrainingError
from comlrl_core.rewards.contract import Oracle, Scored
from comlrl_core.rollout.buffer import NodeSample
from comlrl_core.rollout.transition import Transition
from comlrl_core.team import team as team_module
from comlrl_core.team.generation import Sampling, generate
from comlrl_core.team.scoring import score_completions, scoring_mode
from comlrl_core.team.team import Team, load_team

VOCABULARY, PAD, EOS = 19, 0, 2
TASKS = [{"task_id": name, "prompt": f"the {name} bird."} for name in ("red", "old", "small")]


def policy(seed: int, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, initializer_range=0.4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Recorder:
    """An engine that keeps the accumulated gradient instead of stepping."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradient: list[Tensor] = []
        self.total_steps: int | None = None

    def begin(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> StepResult:
        self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.zero_grad()
        return StepResult(math.sqrt(sum(g.square().sum().item() for g in self.gradient)), 1e-3, False)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def save_state(self, directory: Path) -> None: ...

    def load_state(self, directory: Path) -> None: ...


def node(seed: int, advantages: Sequence[Sequence[float | None]], version: int = 0) -> NodeSample:
    """Random prompts and completions of 1 to 6 tokens, as many as there are advantages per agent."""
    random = torch.Generator().manual_seed(seed)

    def ids() -> tuple[int, ...]:
        length = int(torch.randint(0, 6, (), generator=random))
        return (*torch.randint(3, VOCABULARY, (length,), generator=random).tolist(), EOS)

    return NodeSample(
        turn=1,
        version=version,
        prompts=tuple(ids() for _ in advantages),
        completions=tuple(tuple(ids() for _ in own) for own in advantages),
        advantages=tuple(tuple(own) for own in advantages),
        zero_std=tuple(False for _ in advantages),
    )


NODES = [
    node(0, [[0.5, -0.25, 1.0], [1.5, 0.0, -2.0]]),
    node(1, [[-1.0, None, 2.0], [None, 3.0, 1.0]]),
]


def gradients(
    models: Sequence[nn.Module], nodes: Sequence[NodeSample], **arguments: Any
) -> tuple[list[list[Tensor]], dict]:
    recorders = {id(model): Recorder(model) for model in models}
    engines: list[Any] = [recorders[id(model)] for model in models]
    temperature = arguments.pop("temperature", 0.7)
    metrics, nonfinite = train_minibatch(models, engines, [PAD] * len(models), nodes, temperature, **arguments)
    assert nonfinite == ""
    return [engine.gradient for engine in engines], metrics


def expected_gradient(model: nn.Module, agents: Sequence[int], nodes: Sequence[NodeSample]) -> list[Tensor]:
    """Autograd of -mean over nodes of the mean over counted completions of A log pi, one completion at a time."""
    loss = torch.zeros((), dtype=torch.float64)
    with scoring_mode(model):
        for sample in nodes:
            for agent in agents:
                counted = [a for a in sample.advantages[agent] if a is not None]
                for ids, advantage in zip(sample.completions[agent], sample.advantages[agent], strict=True):
                    if advantage is not None:
                        prompt = sample.prompts[agent]
                        logprobs, _ = score_completions(model, [prompt], [ids], pad_id=PAD, temperature=0.7)
                        loss = loss - advantage * logprobs.sum() / len(counted) / len(nodes)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_close(found: list[Tensor], expected: list[Tensor], atol: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


# --- one minibatch


def test_each_agent_gets_the_gradient_of_its_own_loss() -> None:
    """In fp64, with dropped completions out of the mean, dropout off, at the sampling temperature."""
    models = [policy(0, dropout=0.5), policy(1, dropout=0.5)]
    found, metrics = gradients([model.train() for model in models], NODES)
    for agent, model in enumerate(models):
        assert_close(found[agent], expected_gradient(model, [agent], NODES))
        assert model.training
    assert (metrics["nodes"], metrics["completions"], metrics["dropped_completions"]) == (2, 10, 2)
    assert metrics["loss"] == pytest.approx((metrics["agent_0/loss"] + metrics["agent_1/loss"]) / 2)
    assert metrics["skipped"] == 0


def test_agents_that_share_a_model_step_it_once_with_both_gradients() -> None:
    model = policy(0)
    found, _ = gradients([model, model], NODES)
    assert found[0] is found[1]
    assert_close(found[0], expected_gradient(model, [0, 1], NODES))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_and_its_micro_batches_differ(size: int) -> None:
    """Pitfall 12: the gradient does not depend on how the minibatch is split."""
    whole, first = gradients([policy(0), policy(1)], NODES)
    split, second = gradients([policy(0), policy(1)], NODES, micro_batch_size=size)
    for one, other in zip(whole, split, strict=True):
        assert_close(one, other)
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-12)


def engines_of(models: Sequence[nn.Module]) -> list[Engine]:
    return build_engines(models, OptimizerSettings(1e-2))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_equal_returns_move_nothing_not_even_by_momentum() -> None:
    """After a step with a gradient, one without any leaves every weight as it is."""
    models = [policy(0), policy(1)]
    engines = engines_of(models)
    train_minibatch(models, engines, [PAD] * 2, NODES, 1.0)
    before = [weights(model) for model in models]
    metrics, nonfinite = train_minibatch(models, engines, [PAD] * 2, [node(2, [[0.0, 0.0], [0.0, 0.0]])], 1.0)
    assert (metrics["skipped"], metrics["loss"], nonfinite) == (1, 0.0, "")
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights(model), kept, strict=True))


def test_stepping_one_agent_leaves_the_other_as_it_is() -> None:
    """Pitfall 17."""
    models = [policy(0), policy(1)]
    before = weights(models[1])
    train_minibatch(models, engines_of(models), [PAD] * 2, [node(2, [[1.0, -1.0], [0.0, 0.0]])], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(weights(models[1]), before, strict=True))


def test_a_loss_that_is_not_finite_steps_no_engine() -> None:
    models = [policy(0), policy(1)]
    with torch.no_grad():
        next(models[1].parameters()).fill_(math.nan)
    before = weights(models[0])
    metrics, nonfinite = train_minibatch(models, engines_of(models), [PAD] * 2, NODES, 1.0)
    assert nonfinite == "loss" and metrics["nonfinite"] == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), before, strict=True))


# --- epochs


class Lengths:
    """The reward is the length of all texts together, so that groups differ."""

    def score(
        self,
        completions: Sequence[Sequence[str]],
        batch_items: Sequence[Mapping[str, Any]],
        prompts: Sequence[str | Sequence[str]],
    ) -> list[Scored]:
        totals = [float(sum(map(len, texts))) for texts in zip(*completions, strict=True)]
        return [Scored(total, total) for total in totals]


def tiny(num_agents: int = 2) -> Team:
    return load_team(agent_model="builtin:tiny", num_agents=num_agents)


def of(**changes: Any) -> ReinforceSettings:
    return ReinforceSettings(**{"sampling": Sampling(4), "seed": 0, "num_generations": 2, **changes})


def trained(team: Team, settings: ReinforceSettings, scorer: Any = None, **arguments: Any) -> Learned:
    epochs = arguments.pop("epochs", 1)
    engines = arguments.pop("engines", None) or build_engines(team.models, OptimizerSettings(1e-3))
    return reinforce(team, engines, TASKS, scorer or Lengths(), settings, num_train_epochs=epochs, **arguments)


ECHO = Transition(lambda **given: [f"{given['prompt']} {text}" for text in given["agent_completions"]])


def test_a_buffer_is_filled_and_what_is_left_is_flushed() -> None:
    """Three tasks, a buffer of two: updates of two nodes and of one; 6 joint responses an epoch."""
    learned = trained(tiny(), of(), epochs=2)
    assert [m["nodes"] for m in learned.history] == [2, 1, 2, 1]
    assert [m["environment_steps"] for m in learned.history] == [4, 6, 10, 12]
    assert [(m["epoch"], m["step"]) for m in learned.history] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [m["sample_age"] for m in learned.history] == [0.0] * 4
    assert learned.environment_steps == 12


def test_every_update_trains_on_samples_of_the_current_policy_unless_told_otherwise() -> None:
    """All three tasks at once into a buffer of one: the samples of the last update are two steps old."""
    aged = trained(tiny(), of(rollout_buffer_size=1, collection_batch_size=3))
    assert [m["sample_age"] for m in aged.history] == [0.0, 1.0, 2.0]
    fresh = trained(tiny(), of(rollout_buffer_size=1))
    assert [m["sample_age"] for m in fresh.history] == [0.0, 0.0, 0.0]


def test_minibatches_of_a_tree_never_mix_turns() -> None:
    """Each task has 1 + 2 nodes; a buffer of 6 holds two trees: their first turns, then 4 nodes in minibatches of 3."""
    settings = of(num_turns=2, rollout_buffer_size=6, train_batch_size=3)
    learned = trained(tiny(), settings, transition=ECHO)
    assert [(m["turn"], m["nodes"]) for m in learned.history] == [(1, 2), (2, 3), (2, 1), (1, 1), (2, 2)]
    assert [m["sample_age"] for m in learned.history] == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert learned.environment_steps == 3 * (2 + 4)
    assert steps_per_epoch(3, 2, settings) == len(learned.history)


@pytest.mark.parametrize("settings", [{}, {"num_turns": 3, "rollout_buffer_size": 5, "train_batch_size": 2}])
def test_the_schedule_is_told_how_many_steps_there_will_be(settings: dict) -> None:
    team = tiny()
    engines = [Recorder(model) for model in team.models]
    learned = trained(team, of(**settings), transition=ECHO, engines=engines, epochs=2)
    assert engines[0].total_steps == len(learned.history)


def test_generation_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per agent and turn for all tasks that fill the buffer: 3 tasks, two turns, a buffer of all 9 nodes."""
    counted: list[int] = []

    def counting(model, prompt_ids, **arguments):
        counted.append(len(prompt_ids))
        return generate(model, prompt_ids, **arguments)

    monkeypatch.setattr(team_module, "generate", counting)
    trained(tiny(), of(num_turns=2, rollout_buffer_size=9), transition=ECHO)
    assert counted == [3, 3, 6, 6]


def test_epochs_differ_and_repeat() -> None:
    """Another order and other samples in each epoch; the same ones in another run."""
    seen: list[list[float]] = []
    for _ in range(2):
        metrics: list[float] = []
        hooks = Hooks(on_rollout=lambda found, steps, kept=metrics: kept.append(found["turn_1/reward_mean"]))
        trained(tiny(), of(rollout_buffer_size=1), epochs=2, hooks=hooks, engines=[Recorder(m) for m in tiny().models])
        seen.append(metrics)
    assert seen[0] == seen[1] and sorted(seen[0][:3]) != sorted(seen[0][3:])


def test_epochs_one_by_one_are_a_run() -> None:
    """`reinforce_epoch` with what the epochs before left is what `reinforce` does."""
    at_once, one_by_one = tiny(), tiny()
    expected = trained(at_once, of(), epochs=2)
    engines = build_engines(one_by_one.models, OptimizerSettings(1e-3))
    learned = None
    for epoch in range(2):
        learned = reinforce_epoch(one_by_one, engines, TASKS, Lengths(), of(), epoch=epoch, learned=learned)
    assert learned == expected and one_by_one.fingerprint() == at_once.fingerprint()


def test_collecting_more_at_once_samples_the_same() -> None:
    """Without updates in between (an engine that does not step), batches of tasks change no sample."""
    rewards: list[list[float]] = []
    for size in (1, 3):
        found: list[float] = []

        class Keeping(Lengths):
            def score(self, completions, batch_items, prompts, kept=found):
                scores = super().score(completions, batch_items, prompts)
                kept.extend(score.raw for score in scores)
                return scores

        team = tiny()
        trained(team, of(collection_batch_size=size), Keeping(), engines=[Recorder(m) for m in team.models])
        rewards.append(found)
    assert rewards[0] == rewards[1]


def test_a_constant_reward_changes_nothing_and_is_counted() -> None:
    """K equal returns: no advantage, no NaN, no step; under `raw` there is one."""
    constant = Oracle(lambda a, b: [0.7] * len(a), 2)
    team = tiny()
    before = team.fingerprint()
    learned = trained(team, of(), constant)
    assert team.fingerprint() == before
    assert [(m["frac_zero_std"], m["skipped"], m["loss"]) for m in learned.history] == [(1.0, 1, 0.0)] * 2
    trained(team, of(advantage_mode="raw", advantage_normalization=False), constant)
    assert team.fingerprint() != before


def test_one_bad_reward_is_dropped_alone() -> None:
    """Pitfall 13: one NaN of 6; its node is trained on what is left."""
    calls = iter(range(100))

    def sometimes_bad(a, b):
        return [math.nan if next(calls) == 1 else float(len(x) + len(y)) for x, y in zip(a, b, strict=True)]

    oracle = Oracle(sometimes_bad, 2, on_bad_reward="drop")
    learned = trained(tiny(), of(num_generations=3, rollout_buffer_size=3), oracle)
    assert learned.history[0]["dropped_completions"] == 2  # of both agents
    assert learned.history[0]["completions"] == 2 * (3 + 3 + 3 - 1)
    assert math.isfinite(learned.history[0]["loss"]) and learned.history[0]["skipped"] == 0


def test_all_rewards_dropped_is_an_epoch_without_an_update() -> None:
    oracle = Oracle(lambda a, b: [None] * len(a), 2, on_bad_reward="drop")
    learned = trained(tiny(), of(), oracle)
    assert learned.history == [] and learned.environment_steps == 6


@pytest.mark.parametrize("mode", ["mean", "max", "rloo", "raw"])
def test_normalisation_makes_the_four_identical(mode: Any) -> None:
    base, other = tiny(), tiny()
    trained(base, of(num_generations=3))
    trained(other, of(num_generations=3, advantage_mode=mode))
    assert other.fingerprint() == base.fingerprint()


def test_a_divergence_is_paid_for() -> None:
    """From the second update on the policies differ from the reference; the reward is reported without it."""
    seen: list[dict] = []
    team, free = tiny(), tiny()
    reference = team.copy()
    hooks = Hooks(on_rollout=lambda metrics, steps: seen.append(metrics))
    trained(team, of(rollout_buffer_size=1, kl_coef=5.0), reference=reference, hooks=hooks)
    trained(free, of(rollout_buffer_size=1))
    assert [metrics["kl/agent_1"] > 0 for metrics in seen] == [False, True, True]
    assert seen[0]["kl/agent_1"] == 0.0 and team.fingerprint() != free.fingerprint()


def test_what_is_missing_is_said_before_work_starts() -> None:
    class Untouchable:
        def score(self, *_: Any) -> list[Scored]:
            raise AssertionError("work has started")

    team = tiny()
    for settings, message in (
        (of(kl_coef=0.1), "reference_kl_enabled needs the reference policies"),
        (of(num_turns=2), "external_transition is required with num_turns 2"),
        (of(num_generations=64, num_turns=3, joint_mode="cross"), "leaves per task"),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(team, settings, Untouchable(), transition=None if "transition" in message else ECHO)
    with pytest.raises(ConfigError, match="the reference has 1 agents, the team 2"):
        trained(team, of(kl_coef=0.1), Untouchable(), reference=tiny(1))
    with pytest.raises(ConfigError, match="1 engines for 2 agents"):
        trained(team, of(), Untouchable(), engines=[Recorder(team.models[0])])


class Exploding(LocalEngine):
    """Its gradient is never finite."""

    def step(self) -> StepResult:
        self.zero_grad()
        return StepResult(math.inf, 1e-3, skipped=True)


def test_a_gradient_that_is_not_finite_ends_the_run_or_is_counted() -> None:
    """Pitfall 14: three in a row end it in any case, over the borders of epochs too."""
    team = tiny(1)
    engines: list[Engine] = [Exploding(team.models[0], OptimizerSettings(1e-3))]
    with pytest.raises(TrainingError, match=r"gradient of epoch 0, optimizer step 0 \(turn 1\) is not finite"):
        trained(team, of(), engines=engines)
    told: list[dict] = []
    with pytest.raises(TrainingError, match="nor were the 2 before it"):
        trained(
            team, of(on_nonfinite="skip"), engines=engines, epochs=3,
            hooks=Hooks(on_step=lambda metrics, steps: told.append(metrics)),
        )  # fmt: skip
    assert [(m["epoch"], m["nonfinite"]) for m in told] == [(0, 1), (0, 1), (1, 1)]
