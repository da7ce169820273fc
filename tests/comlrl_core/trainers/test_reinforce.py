"""The trainers of the REINFORCE family: published code, turns, evaluation, checkpoints, what is refused."""

import inspect
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from comlrl_core.environments import length_ratio as environment
from comlrl_core.errors import ConfigError, DataError, RewardError, TransitionError
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.rollout.evaluation import evaluate_turns
from comlrl_core.store import Manifest
from comlrl_core.team.checkpoint import digest_folder, load_team_folder
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import load_team
from comlrl_core.trainers import reinforce
from comlrl_core.trainers.checkpoints import list_checkpoints

TINY = "builtin:tiny"
KINDS = ["MAGRPO", "MARLOO", "MAReMax", "MAREINFORCE"]
TWO_TURNS = {"num_turns": 2, "num_generations": 2, "rollout_buffer_size": 3}


def test_code_of_the_published_kind_runs(tmp_path: Path) -> None:
    from comlrl_core.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

    def reward(completion1: Sequence[str], completion2: Sequence[str]) -> list[float]:
        return [math.exp(-abs(len(b) / max(1, len(a)) - 2.5)) for a, b in zip(completion1, completion2, strict=True)]

    def external_transition(
        prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None
    ):
        return [f"{prompt} Revise: {agent_completions[i]}" for i in range(num_agents)]

    def eval_logger(agent_completions_turns, batch_items, prompts):
        return [{"turns": len(turns)} for turns in agent_completions_turns[0]]

    def eval_aggregator(metrics, num_turns):
        return {f"turn_{num_turns}/turns": fmean(one["turns"] for one in metrics)}

    reported: dict[str, float] = {}
    trainer = MAGRPOTrainer(
        agent_model=TINY,
        num_agents=2,
        reward_func=reward,
        reward_processor=lambda value: 2 * value,
        formatters=[lambda row: f"[1] {row['prompt']}", lambda row: f"[2] {row['prompt']}"],
        args=MAGRPOConfig(
            num_turns=2,
            num_train_epochs=1,
            num_generations=2,
            max_new_tokens=6,
            agent_learning_rate=5e-4,
            early_termination_threshold=None,
            joint_mode="cross",
            logging_steps=1,
            eval_interval=2,
            eval_num_samples=2,
        ),
        train_dataset=[{"prompt": f"the {word} bird sings."} for word in ("red", "old", "small")],
        eval_dataset=[{"prompt": "a slow song."}, {"prompt": "a warm song."}],
        external_transition=external_transition,
        eval_logger=eval_logger,
        eval_aggregator=eval_aggregator,
        metrics_callback=lambda metrics, step: reported.update(metrics),
    )
    before = trainer.team.fingerprint()
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert trainer.team.fingerprint() != before
    assert trainer.environment_steps == 3 * (4 + 4 * 4)
    assert load_team_folder(tmp_path / "out").fingerprint() == trainer.team.fingerprint()
    expected = {
        "turn_1/reward_mean", "turn_2/expected_return", "train/loss", "train/grad_norm", "train/sample_age",
        "train/frac_zero_std", "eval/turn_1/reward_mean", "eval/turn_2/expected_return",
    }  # fmt: skip
    assert expected <= reported.keys()
    assert reported["eval/turn_2/turns"] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_trains_alone_and_together(make_reinforce, kind: str) -> None:
    """With one agent this is GRPO, RLOO, ReMax or REINFORCE."""
    loaded = load_team(agent_model=TINY, num_agents=1)
    alone = make_reinforce(
        {"advantage_normalization": False}, kind, agent_model=loaded.models[0], tokenizer=loaded.agents[0].tokenizer,
        reward_func=lambda texts: [float(len(text)) for text in texts],
    )  # fmt: skip
    together = make_reinforce({"advantage_normalization": False}, kind)
    for trainer in (alone, together):
        before = trainer.team.fingerprint()
        trainer.train()
        assert trainer.team.fingerprint() != before
        assert trainer.environment_steps == 2 * 3 * 3


def test_the_published_arguments() -> None:
    published = {
        "agent_model", "agents", "num_agents", "tokenizer", "reward_func", "reward_processor", "formatters", "args",
        "train_dataset", "eval_dataset", "model_config", "external_transition", "eval_logger", "eval_aggregator",
        "wandb_config",
    }  # fmt: skip
    for kind in KINDS:
        trainer, config = getattr(reinforce, f"{kind}Trainer"), getattr(reinforce, f"{kind}Config")
        assert trainer.config_class is config and issubclass(trainer, reinforce.MAGRPOTrainer)
        assert set(inspect.signature(trainer).parameters) >= published
        train = inspect.signature(trainer.train).parameters
        assert {name: parameter.default for name, parameter in train.items() if name != "self"} == {
            "resume_from_checkpoint": None,
            "checkpoint_dir": None,
            "checkpoint_interval": 1,
            "checkpoint_total_limit": None,
        }


# --- bad input


def test_a_trainer_of_several_turns_needs_a_transition() -> None:
    """The published default is two turns."""
    with pytest.raises(ConfigError, match="external_transition is required with num_turns 2"):
        reinforce.MAGRPOTrainer(agent_model=TINY, reward_func=length_ratio)


def test_another_algorithms_settings_are_refused(make_reinforce) -> None:
    with pytest.raises(ConfigError, match="args must be a MAGRPOConfig, not a MARLOOConfig"):
        reinforce.MAGRPOTrainer(agent_model=TINY, reward_func=length_ratio, args=reinforce.MARLOOConfig(num_turns=1))


def test_a_transition_of_the_wrong_count_is_an_error_that_names_it(make_reinforce) -> None:
    def one_for_all(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        return [prompt]

    with pytest.raises(TransitionError, match=r"one_for_all .* returned 1 prompts for 2 agents"):
        make_reinforce(TWO_TURNS, external_transition=one_for_all).train()
    with pytest.raises(ConfigError, match="cannot be called with the keywords"):
        make_reinforce(TWO_TURNS, external_transition=lambda prompt: [prompt] * 2)


@pytest.mark.parametrize("policy", ["fail", "drop"])
def test_one_nan_reward(make_reinforce, policy: str) -> None:
    """Pitfall 13: an error naming the function, or that joint response alone dropped and counted."""
    calls = iter(range(100))

    def sometimes_bad(a, b):
        return [math.nan if next(calls) == 1 else float(len(x) + 2 * len(y)) for x, y in zip(a, b, strict=True)]

    reported: list[dict] = []
    trainer = make_reinforce(
        {"on_bad_reward": policy, "logging_steps": 1, "num_train_epochs": 1}, reward_func=sometimes_bad,
        metrics_callback=lambda metrics, step: reported.append(metrics),
    )  # fmt: skip
    if policy == "fail":
        with pytest.raises(RewardError, match="sometimes_bad returned nan"):
            trainer.train()
        return
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.fingerprint() != before
    assert max(metrics.get("rollout/dropped", 0.0) for metrics in reported) == 1.0
    assert max(metrics.get("train/dropped_completions", 0.0) for metrics in reported) == 2.0


def test_training_needs_tasks_and_evaluation_none(make_reinforce) -> None:
    trainer = make_reinforce(train_dataset=None)
    assert trainer.evaluate() == {}
    with pytest.raises(ConfigError, match="train_dataset is required"):
        trainer.train()


def test_a_transition_without_a_second_turn_is_said_to_have_no_effect(make_reinforce, caplog) -> None:
    make_reinforce(external_transition=environment.transition)
    assert any("external_transition has no effect" in message for message in caplog.messages)


# --- evaluation


@pytest.mark.parametrize("turns", [1, 2])
def test_evaluating_every_step_or_never_gives_the_same_weights(make_reinforce, held_out, turns: int) -> None:
    """Pitfall 20."""
    found = []
    for every in (0, 1):
        trainer = make_reinforce(
            {"num_turns": turns, "eval_interval": every, "rollout_buffer_size": 1}, eval_dataset=held_out,
            external_transition=environment.transition if turns > 1 else None,
        )  # fmt: skip
        trainer.train()
        found.append(trainer.team.fingerprint())
    assert found[0] == found[1]


def test_evaluation_comes_before_every_batch_that_the_interval_divides(make_reinforce, held_out) -> None:
    """Task 0 and 2 of each epoch, before they are answered: after 0, 6, 9 and 15 joint responses."""
    steps: list[int] = []

    def callback(metrics: dict, step: int) -> None:
        if "eval/turn_1/reward_mean" in metrics:
            steps.append(step)

    make_reinforce(
        {"eval_interval": 2, "rollout_buffer_size": 1}, eval_dataset=held_out, metrics_callback=callback
    ).train()
    assert steps == [0, 6, 9, 15]


def test_every_turn_is_evaluated(make_reinforce, held_out) -> None:
    """The expected return of the first turn is its reward and, discounted, the second's."""
    trainer = make_reinforce(
        {**TWO_TURNS, "tree_discount": 0.5}, eval_dataset=held_out, external_transition=environment.transition
    )
    found = trainer.evaluate()
    first, second = (found[f"eval/turn_{turn}/reward_mean"] for turn in (1, 2))
    assert found["eval/turn_1/tasks"] == found["eval/turn_2/tasks"] == 2
    assert found["eval/turn_1/expected_return"] == pytest.approx(first + 0.5 * second)
    assert found["eval/turn_2/expected_return"] == second
    assert trainer.evaluate() == found and trainer.evaluate(1)["eval/turn_2/tasks"] == 1


# --- checkpoints

VARIANTS: list[dict[str, Any]] = [
    {},
    {"reference_kl_enabled": True, "rollout_buffer_size": 1},
    TWO_TURNS,
    {"joint_mode": "cross", "lr_schedule": "constant_with_warmup", "lr_warmup_steps": 3},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "reference", "turns", "cross"])
def test_two_epochs_and_two_more_are_four(make_reinforce, tmp_path: Path, variant: dict) -> None:
    """Pitfall 26: a resumed run leaves the same folder, byte for byte, as four epochs at once."""
    transition = environment.transition if "num_turns" in variant else None
    four = make_reinforce({**variant, "num_train_epochs": 4}, external_transition=transition)
    four.train(checkpoint_dir=tmp_path / "four")
    make_reinforce(variant, external_transition=transition).train(checkpoint_dir=tmp_path / "two")
    more = make_reinforce({**variant, "num_train_epochs": 4}, external_transition=transition)
    more.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "two")
    assert more.team.fingerprint() == four.team.fingerprint()
    assert more.environment_steps == four.environment_steps > 0
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == [f"epoch_{n:04d}" for n in range(1, 5)]
    for name in ("epoch_0002", "epoch_0004"):
        assert digest_folder(tmp_path / "two" / name) == digest_folder(tmp_path / "four" / name)
    manifest = Manifest.read(tmp_path / "two" / "epoch_0004" / "manifest.json")
    assert (manifest.iteration, manifest.environment_steps) == (4, four.environment_steps)
    assert manifest.policy == four.team.fingerprint()


def test_a_run_and_its_continuation_report_what_an_unbroken_run_does(make_reinforce, tmp_path: Path, held_out) -> None:
    def reporting(epochs: int) -> tuple[list, Any]:
        reports: list[tuple[int, dict]] = []
        trainer = make_reinforce(
            {"num_train_epochs": epochs, "logging_steps": 7, "eval_interval": 2}, eval_dataset=held_out,
            metrics_callback=lambda metrics, step: reports.append((step, metrics)),
        )  # fmt: skip
        return reports, trainer

    four, trainer = reporting(4)
    trainer.train()
    two, trainer = reporting(2)
    trainer.train(checkpoint_dir=tmp_path)
    more, trainer = reporting(4)
    trainer.train(resume_from_checkpoint=tmp_path)
    assert four == two + more and len({step for step, _ in four}) > 8


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from comlrl_core.trainers.reinforce import MARLOOConfig, MARLOOTrainer
args = MARLOOConfig(num_train_epochs=4, num_turns=1, num_generations=3, max_new_tokens=6, temperature=1.0, top_p=1.0,
    top_k=None, agent_learning_rate=1e-3, early_termination_threshold=None, eval_interval=0, reference_kl_enabled=True)
trainer = MARLOOTrainer(agent_model="builtin:tiny", reward_func="builtin:length_ratio", args=args,
    train_dataset=[{"prompt": f"the {w} bird sings."} for w in ("red", "old", "small")], formatters="{prompt}\\n")
trainer.train(resume_from_checkpoint=sys.argv[1])
print(trainer.team.fingerprint())
"""


@pytest.mark.slow
def test_two_more_epochs_in_another_process(make_reinforce, tmp_path: Path) -> None:
    """As the published tutorial has it: the same weights as four epochs at once."""
    args = {"reference_kl_enabled": True}
    reward = "builtin:length_ratio"
    make_reinforce(args, "MARLOO", reward_func=reward).train(checkpoint_dir=tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "epoch_0002")], capture_output=True, text=True, check=True
    )
    four = make_reinforce({**args, "num_train_epochs": 4}, "MARLOO", reward_func=reward)
    four.train()
    assert result.stdout.split()[-1] == four.team.fingerprint()


def test_checkpoints_by_interval_and_limit(make_reinforce, tmp_path: Path) -> None:
    make_reinforce({"num_train_epochs": 5}).train(
        checkpoint_dir=tmp_path, checkpoint_interval=2, checkpoint_total_limit=2
    )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_0004", "epoch_0005"]


def test_resuming_with_another_setting_is_refused_by_name(make_reinforce, tmp_path: Path) -> None:
    make_reinforce().train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match="num_generations is 4, was 3"):
        make_reinforce({"num_generations": 4}).train(resume_from_checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="trainer is 'MARLOOTrainer', was 'MAGRPOTrainer'"):
        make_reinforce(kind="MARLOO").train(resume_from_checkpoint=tmp_path)


def test_another_transition_is_another_run(make_reinforce, tmp_path: Path) -> None:
    make_reinforce(TWO_TURNS, external_transition=environment.transition).train(checkpoint_dir=tmp_path)
    other = make_reinforce(TWO_TURNS, external_transition=lambda **given: list(given["agent_completions"]))
    with pytest.raises(ConfigError, match="external_transition is"):
        other.train(resume_from_checkpoint=tmp_path)


def test_a_reference_that_is_missing_on_resuming_is_an_error(make_reinforce, tmp_path: Path) -> None:
    args = {"reference_kl_enabled": True}
    make_reinforce(args).train(checkpoint_dir=tmp_path)
    (tmp_path / "policies").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="policies that this run compares with are not there"):
        make_reinforce({**args, "num_train_epochs": 3}).train(resume_from_checkpoint=tmp_path)


def test_a_decaying_learning_rate_ties_a_run_to_its_length(make_reinforce, tmp_path: Path) -> None:
    make_reinforce({"lr_schedule": "linear"}).train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match="num_train_epochs is 4, was 2"):
        make_reinforce({"lr_schedule": "linear", "num_train_epochs": 4}).train(resume_from_checkpoint=tmp_path)


# --- learning


class Stop(Exception):
    """The time of a learning check is up."""


def learned(kind: str, seed: int, seconds: float, shuffled: bool = False, **changes: Any) -> list[list[float]]:
    """Held-out reward per turn before and after `seconds` of training on one thread."""
    args = {
        "num_turns": 1, "num_generations": 4, "joint_mode": "cross", "rollout_buffer_size": 4, "max_new_tokens": 40,
        "temperature": 1.0, "top_p": 1.0, "top_k": None, "agent_learning_rate": 3e-3, "adam_beta2": 0.99,
        "early_termination_threshold": None, "num_train_epochs": 1000, "eval_interval": 0, "seed": seed,
        "advantage_normalization": kind == "MAGRPO", "logging_steps": 1, **changes,
    }  # fmt: skip
    train, held_out = environment.make_tasks(256, 48)
    shuffling = random.Random(seed)

    def reward(first: list[str], second: list[str]) -> list[float]:
        rewards = length_ratio(first, second)
        if shuffled:
            shuffling.shuffle(rewards)
        return rewards

    trainer = getattr(reinforce, f"{kind}Trainer")(
        agent_model=TINY, reward_func=reward, args=getattr(reinforce, f"{kind}Config")(**args), train_dataset=train,
        formatters=["[1] {prompt}\n", "[2] {prompt}\n"],
        external_transition=environment.transition if args["num_turns"] > 1 else None,
    )  # fmt: skip

    def held_out_rewards() -> list[float]:
        turns = evaluate_turns(
            trainer.team, Oracle(length_ratio, 2), held_out, num_turns=args["num_turns"],
            transition=trainer.transition, sampling=Sampling(40), seed=1,
        )  # fmt: skip
        return [fmean(sample.reward or 0.0 for sample in turn) for turn in turns]

    before, end = held_out_rewards(), time.monotonic() + seconds

    def callback(metrics: dict, step: int) -> None:
        if time.monotonic() > end:
            raise Stop

    trainer.metrics_callback = callback
    with pytest.raises(Stop):
        trainer.train()
    return [before, held_out_rewards()]


@pytest.mark.slow
@pytest.mark.endurance
def test_a_tiny_team_learns_over_two_turns() -> None:
    """30 seconds on one thread; 60 seconds end at 0.99 in both turns (three seeds of three)."""
    before, after = learned("MAGRPO", 0, 30.0, num_turns=2, joint_mode="aligned", rollout_buffer_size=20)
    assert before[0] < 0.45 and before[1] < 0.45
    assert after[0] > before[0] and after[1] > before[1] + 0.1
