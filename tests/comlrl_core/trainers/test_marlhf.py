"""`MARLHFTrainer` and `MARLHFIterTrainer`: iterations, resuming, saving, refusals."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.files import read_iteration, read_meta
from comlrl_core.preference.reward_model import load_reward_model
from comlrl_core.team.checkpoint import digest_folder
from comlrl_core.team.tiny import load_tiny
from comlrl_core.trainers.checkpoints import list_checkpoints
from comlrl_core.trainers.preference import MARLHFConfig, MARLHFIterConfig, MARLHFIterTrainer, MARLHFTrainer

TINY = "builtin:tiny"
SETTINGS = {
    "num_generations": 2, "num_train_epochs": 1, "rollout_buffer_size": 2, "reward_learning_rate": 1e-3,
    "reward_train_batch_size": 4, "reward_num_train_epochs": 1, "reward_eval_fraction": 0.0, "reward_probe_samples": 3,
}  # fmt: skip

Make = Callable[..., Any]


@pytest.fixture
def make(settings, tasks, reward, tmp_path: Path) -> Make:
    """`make(kind, args={...}, **arguments)`: an `iterative` or `offline` trainer of two iterations or epochs."""

    def trainer(kind: str, args: dict[str, Any] | None = None, **arguments: Any) -> Any:
        own = {"num_iterations": 2, "preference_replay_dir": str(tmp_path / "replay")} if kind == "iterative" else {}
        chosen = settings(**{**SETTINGS, **own, **(args or {})})
        given = {
            "agent_model": None if "agents" in arguments else TINY,
            "reward_func": reward,
            "train_dataset": tasks,
            "formatters": "{prompt}\n",
            **arguments,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if kind == "iterative":
            return MARLHFIterTrainer(args=MARLHFIterConfig(**chosen), **given)
        return MARLHFTrainer(args=MARLHFConfig(**chosen), **given)

    return trainer


@pytest.mark.parametrize("backend", ["magrpo", "mareinforce", "marloo", "maremax", "maac", "iac"])
def test_every_backend_runs_iteratively(make, backend: str) -> None:
    trainer = make("iterative", {"rl_algorithm": backend, "advantage_normalization": False})
    assert (trainer.critics is not None) == (backend in ("maac", "iac"))
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.fingerprint() != before
    assert trainer.environment_steps == 2 * 3 * 2  # iterations x tasks x joint responses scored
    assert trainer.reward_model is not None
    assert trainer.manifest.eligible() == [1, 2]


@pytest.mark.parametrize("kind", ["iterative", "offline"])
def test_metrics_of_every_part_are_reported(make, held_out, kind: str) -> None:
    seen: dict[str, float] = {}
    trainer = make(
        kind,
        {"eval_interval": 1, "logging_steps": 1},
        eval_dataset=held_out,
        metrics_callback=lambda metrics, step: seen.update(metrics),
    )
    trainer.train()
    assert {
        "turn_1/reward_mean", "eval/turn_1/reward_mean", "train/loss", "reward_model/train_pairs",
        "reward_model/learned_reward_mean", "reward_model/after/oracle_reward_mean", "reward_model/alarm",
    } <= seen.keys()  # fmt: skip
    assert all(math.isfinite(value) for value in seen.values())


def test_evaluation_is_by_the_task_reward(make, held_out, tmp_path: Path) -> None:
    """The same team gives the same evaluation, whatever its reward model says."""
    trainer = make("iterative", {"preference_scoring_reward": "reward_model"}, eval_dataset=held_out)
    trainer.train()
    found = trainer.evaluate()
    trainer.reward_model = None
    assert trainer.evaluate() == found


def test_the_newest_reward_model_labels_pairs(make, tmp_path: Path) -> None:
    make("iterative", {"preference_scoring_reward": "reward_model"}).train()
    first, second = (read_meta(tmp_path / "replay", n)["oracle"] for n in (1, 2))
    assert not first.startswith("reward_model@") and second.startswith("reward_model@")
    assert {record.oracle for record in read_iteration(tmp_path / "replay" / "iteration_0002.json")} == {second}


@pytest.mark.parametrize("kind", ["iterative", "offline"])
def test_a_constant_reward_gives_no_pair_and_a_clean_end(make, kind: str, tmp_path: Path, caplog) -> None:
    trainer = make(kind, reward_func=lambda first, second: [1.0] * len(first))
    before = trainer.team.fingerprint()
    trainer.train(checkpoint_dir=tmp_path / "checkpoints")
    assert trainer.team.fingerprint() == before
    assert trainer.reward_model is None
    assert "there are no pairs to fit a reward model to" in caplog.text
    if kind == "iterative":
        assert len(list_checkpoints(tmp_path / "checkpoints")) == 2  # later iterations ran


RESUMED = [
    {},
    {"reward_model_init": "previous", "preference_replay_mode": "all_history"},
    {"preference_scoring_reward": "reward_model", "reference_kl_enabled": True},
    {"optimizer_state": "reset"},
    {"rl_algorithm": "maac", "critic_type": "q"},
    {"rl_algorithm": "iac", "use_separate_critic": False, "optimizer_state": "reset", "reference_kl_enabled": True},
]


@pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: "-".join(map(str, changes.values())) or "default")
def test_resumed_iterations_give_the_same_bytes(make, tmp_path: Path, changes: dict) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def of(iterations: int, folder: Path) -> MARLHFIterTrainer:
        args = {"num_iterations": iterations, "preference_replay_dir": str(folder / "replay"), **changes}
        return make("iterative", args)

    of(3, whole).train(checkpoint_dir=whole)
    of(2, broken).train(checkpoint_dir=broken)
    of(3, broken).train(resume_from_checkpoint=True, checkpoint_dir=broken)
    assert digest_folder(broken / "iteration_0003") == digest_folder(whole / "iteration_0003")
    for name in ("iteration_0001.json", "iteration_0002.json", "iteration_0003.json", "iteration_0003.meta.json"):
        assert (broken / "replay" / name).read_bytes() == (whole / "replay" / name).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [{}, {"reference_kl_enabled": True}, {"rl_algorithm": "maac"}, {"rl_algorithm": "iac", "num_generations": 1}],
    ids=["plain", "kl", "maac", "iac"],
)
def test_two_epochs_then_two_more_are_four(make, tmp_path: Path, changes: dict) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make("offline", {"num_train_epochs": 4, **changes}).train(checkpoint_dir=whole)
    make("offline", {"num_train_epochs": 2, **changes}).train(checkpoint_dir=broken)
    resumed = make("offline", {"num_train_epochs": 4, **changes})
    resumed.train(resume_from_checkpoint=broken)
    assert digest_folder(broken / "epoch_0004") == digest_folder(whole / "epoch_0004")
    assert resumed.environment_steps == 4 * 3 * changes.get("num_generations", 2)
    assert resumed.reward_model is not None


def test_an_offline_checkpoint_without_its_reward_model_is_refused(make, tmp_path: Path) -> None:
    make("offline", {"num_train_epochs": 1}).train(checkpoint_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "epoch_0001" / "reward_model")
    with pytest.raises(DataError, match="reward_model: the reward model of this run is missing"):
        make("offline", {"num_train_epochs": 2}).train(resume_from_checkpoint=tmp_path / "run")


def test_another_setting_of_the_reward_model_is_another_run(make, tmp_path: Path) -> None:
    make("iterative", {"num_iterations": 1}).train(checkpoint_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="reward_learning_rate"):
        make("iterative", {"reward_learning_rate": 2e-3}).train(resume_from_checkpoint=tmp_path / "run")


def test_save_model_writes_agents_and_reward_model_that_load_again(make, tmp_path: Path) -> None:
    trainer = make("iterative", {"num_iterations": 1})
    trainer.save_model(tmp_path / "before")
    assert not (tmp_path / "before" / "reward_model").exists()
    trainer.train()
    trainer.save_model(tmp_path / "out")
    assert trainer.reward_model is not None
    assert load_reward_model(tmp_path / "out" / "reward_model").fingerprint() == trainer.reward_model.fingerprint()
    shutil.rmtree(tmp_path / "replay")
    again = make(
        "iterative",
        {"num_iterations": 1, "reward_model_name": str(tmp_path / "out" / "reward_model")},
        agents=[str(tmp_path / "out" / f"agent_{index}") for index in (0, 1)],
    )
    again.train()
    assert again.team.fingerprint() != trainer.team.fingerprint()


def test_loaded_agents_without_an_identifier_need_reward_model_name(make, tmp_path: Path) -> None:
    agents = [load_tiny(seed) for seed in (0, 1)]
    given = {"agents": [model for model, _ in agents], "tokenizer": [tokenizer for _, tokenizer in agents]}
    with pytest.raises(ConfigError, match="reward_model_name is needed"):
        make("iterative", **given)
    trainer = make("iterative", {"num_iterations": 1, "reward_model_name": TINY}, **given)
    trainer.train()
    assert trainer.reward_model is not None


@pytest.mark.parametrize(
    ("args", "arguments", "message"),
    [
        ({"reward_model_name": "builtin:huge"}, {}, "reward_model_name: there is no model 'builtin:huge'"),
        ({"reward_max_length": 5000}, {}, "reward_max_length 5000 is above"),
        ({}, {"critic_model": TINY}, "critic_model belongs to rl_algorithm: maac or iac"),
        ({}, {"critics": [TINY, TINY]}, "critics belongs to rl_algorithm: maac or iac"),
        ({"rl_algorithm": "maac", "critic_model_name": "builtin:huge"}, {}, "critic_model_name: there is no model"),
        ({"rl_algorithm": "maac"}, {"critics": [TINY, TINY]}, "critics must be a list with 1 model"),
        ({}, {"agent_model": None}, "give either agent_model"),
        ({}, {"reward_func": None}, "reward_func is required"),
    ],
)
def test_refused_before_any_model_is_loaded(make, monkeypatch, args: dict, arguments: dict, message: str) -> None:
    from comlrl_core.trainers import team_trainer

    monkeypatch.setattr(team_trainer, "load_team", lambda **_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        make("iterative", args, **arguments)


@pytest.mark.parametrize("kind", ["iterative", "offline"])
def test_another_algorithms_config_is_refused(kind: str, reward) -> None:
    trainer, wrong = (MARLHFIterTrainer, MARLHFConfig()) if kind == "iterative" else (MARLHFTrainer, MARLHFIterConfig())
    with pytest.raises(ConfigError, match="args must be a"):
        trainer(agent_model=TINY, reward_func=reward, args=wrong)


def test_the_published_modules_have_the_published_names() -> None:
    from comlrl_core.trainers import preference

    assert {"MARLHFConfig", "MARLHFTrainer", "MARLHFIterConfig", "MARLHFIterTrainer"} <= set(preference.__all__)


def test_evaluating_more_often_changes_no_weight(make, held_out, tmp_path: Path) -> None:
    prints = set()
    for interval in (0, 1):
        folder = tmp_path / str(interval)
        args = {"eval_interval": interval, "preference_replay_dir": str(folder)}
        trainer = make("iterative", args, eval_dataset=held_out)
        trainer.train()
        assert trainer.reward_model is not None
        prints.add((trainer.team.fingerprint(), trainer.reward_model.fingerprint()))
    assert len(prints) == 1


@pytest.mark.slow
@pytest.mark.endurance
def test_learns_through_the_reward_model(tmp_path: Path) -> None:
    """Three iterations on the length-ratio tasks: the task reward rises by 0.2, the model is right on held-out pairs.

    Five iterations of three seeds rise from 0.41 to 0.77 or more, with an accuracy of 0.8 or more at the end.
    """
    from comlrl_core.environments.tasks import make_builtin_tasks
    from comlrl_core.rewards.length_ratio import length_ratio

    train, held_out = make_builtin_tasks("builtin:length_ratio", 48, 48, 0)
    seen: list[dict[str, float]] = []
    trainer = MARLHFIterTrainer(
        agent_model="builtin:tiny-pretrained",
        reward_func=length_ratio,
        formatters=["[1] {prompt}\n", "[2] {prompt}\n"],
        train_dataset=train,
        eval_dataset=held_out,
        metrics_callback=lambda metrics, step: seen.append(metrics),
        args=MARLHFIterConfig(
            seed=3,
            num_threads=1,
            num_iterations=3,
            max_new_tokens=40,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            preference_num_candidates=16,
            preference_pairs_per_sample=8,
            pair_selection="reward_gap",
            min_reward_gap=0.2,
            preference_replay_mode="all_history",
            preference_replay_sample_size=768,
            preference_replay_dir=str(tmp_path / "replay"),
            reward_learning_rate=1e-3,
            reward_train_batch_size=8,
            reward_num_train_epochs=1,
            reward_model_init="previous",
            reward_eval_fraction=0.2,
            num_generations=8,
            rollout_buffer_size=8,
            agent_learning_rate=3e-4,
            adam_beta2=0.99,
            eval_interval=0,
        ),
    )
    before = trainer.evaluate(48)["eval/turn_1/reward_mean"]
    trainer.train()
    assert trainer.evaluate(48)["eval/turn_1/reward_mean"] > before + 0.2
    accuracies = [m["reward_model/heldout_accuracy"] for m in seen if "reward_model/heldout_accuracy" in m]
    assert accuracies[-1] > 0.7
