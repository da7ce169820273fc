"""`MADPOIterTrainer`: iterations, replay, comparators, resuming."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError, DataError, RewardError
from comlrl_core.preference.files import read_iteration, read_meta
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.store import Manifest
from comlrl_core.team import team as team_module
from comlrl_core.team.generation import generate
from comlrl_core.trainers.checkpoints import list_checkpoints

TINY = "builtin:tiny"


def test_code_of_the_published_kind_runs(tmp_path: Path) -> None:
    from comlrl_core.trainers.preference import MADPOIterConfig, MADPOIterTrainer

    def reward(completion1: Sequence[str], completion2: Sequence[str]) -> list[float]:
        rewards = []
        for c1, c2 in zip(completion1, completion2, strict=True):
            ratio = len(c2) / max(1, len(c1))
            rewards.append(1.0 if 2.0 <= ratio <= 3.0 else math.exp(-min(abs(ratio - 2.0), abs(ratio - 3.0))))
        return rewards

    args = MADPOIterConfig(
        num_iterations=2,
        num_train_epochs=1,
        agent_learning_rate=5e-4,
        max_new_tokens=6,
        temperature=1.0,
        top_p=1.0,
        preference_num_candidates=4,
        preference_pairs_per_sample=2,
        pair_selection="comparator_reward",
        dpo_beta=0.1,
        preference_replay_mode="lambda_decay",
        preference_replay_lambda=0.8,
        preference_replay_sample_size=256,
        preference_replay_dir=str(tmp_path / "replay"),
        comparator_policy="current",
        rollout_buffer_size=64,
        eval_interval=2,
        eval_num_samples=2,
    )
    trainer = MADPOIterTrainer(
        agent_model="builtin:tiny",
        num_agents=2,
        reward_func=reward,
        formatters=[lambda row: f"[1] {row['prompt']}", lambda row: f"[2] {row['prompt']}"],
        args=args,
        train_dataset=[{"prompt": f"the {word} bird sings."} for word in ("red", "old", "small")],
        eval_dataset=[{"prompt": "a slow song."}],
    )
    before = trainer.team.fingerprint()
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert trainer.team.fingerprint() != before
    assert trainer.environment_steps == 2 * 256 * 2
    assert (tmp_path / "out" / "agent_1" / "model.safetensors").is_file()


REPLAYS = [
    {"preference_replay_mode": "current"},
    {"preference_replay_mode": "nearest_k", "preference_replay_k": 2},
    {"preference_replay_mode": "all_history", "preference_replay_sample_size": 7},
    {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0.5},
]


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay["preference_replay_mode"])
def test_every_replay_mode_runs(make_iterative, replay: dict) -> None:
    trainer = make_iterative({"num_iterations": 3, **replay})
    trainer.train()
    folder = Path(trainer.args.preference_replay_dir)
    sizes = [len(read_iteration(folder / f"iteration_{n:04d}.json")) for n in (1, 2, 3)]
    drawn = [7, 7, 7] if "preference_replay_sample_size" in replay else sizes
    assert trainer.environment_steps == 2 * sum(drawn)
    assert trainer.manifest.eligible() == [1, 2, 3]


COMPARATORS = [
    {"comparator_policy": "current"},
    {"comparator_policy": "current_copy"},
    {"comparator_policy": "history"},
    {"comparator_policy": "model", "comparator_model_name": TINY, "comparator_num_candidates": 2},
    {"comparator_policy": "model", "comparator_agents": [TINY, TINY]},
]


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_every_comparator_policy_runs(make_iterative, tmp_path: Path, comparator: dict) -> None:
    trainer = make_iterative({"num_iterations": 3, "policy_checkpoint_dir": str(tmp_path / "policies"), **comparator})
    trainer.train()
    metas = [read_meta(tmp_path / "replay", n) for n in (1, 2, 3)]
    versions = {
        "history": ["iteration_0000", "iteration_0000", "iteration_0001"],
        "model": [TINY] * 3,
    }.get(comparator["comparator_policy"], ["current"] * 3)
    assert [meta["comparator"] for meta in metas] == versions
    other = comparator.get("comparator_num_candidates", 4)
    assert [meta["counts"]["candidates"] for meta in metas] == [3 * (4 + other)] * 3
    assert sorted(path.name for path in (tmp_path / "policies").iterdir()) == [f"iteration_{n:04d}" for n in range(4)]


def test_a_copy_answers_as_the_live_team_does(make_iterative, tmp_path: Path) -> None:
    texts = []
    for policy in ("current", "current_copy"):
        replay = tmp_path / policy
        make_iterative({"comparator_policy": policy, "preference_replay_dir": str(replay)}).train()
        texts.append([r.winner_completions for r in read_iteration(replay / "iteration_0002.json")])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("reference", "loss_type"),
    [("none", "sigmoid"), ("initial", "sigmoid"), ("previous", "sigmoid"), ("none", "ipo"), ("previous", "hinge")],
)
def test_every_reference_and_loss_type_runs(make_iterative, reference: str, loss_type: str) -> None:
    """With a reference the first margin of the run is 0, and the loss what it then is."""
    losses: list[float] = []

    def note(metrics: dict, step: int) -> None:
        if "train/loss" in metrics:
            losses.append(metrics["train/loss"])

    args = {"reference": reference, "loss_type": loss_type, "logging_steps": 1, "dpo_beta": 0.5}
    trainer = make_iterative(args, metrics_callback=note)
    trainer.train()
    assert len(losses) > 2 and all(map(math.isfinite, losses))
    if reference != "none":
        assert losses[0] == pytest.approx({"sigmoid": math.log(2), "hinge": 1.0}[loss_type], abs=1e-3)


@pytest.mark.parametrize(("batch", "batches"), [(None, 1), (16, 4)])
def test_one_generation_per_agent_and_side(make_iterative, monkeypatch, batch: int | None, batches: int) -> None:
    """64 tasks, 2 agents, both sides: 4 calls per collection batch, and none elsewhere."""
    calls: list[int] = []

    def counted(model, prompt_ids, **settings):
        calls.append(len(prompt_ids))
        return generate(model, prompt_ids, **settings)

    monkeypatch.setattr(team_module, "generate", counted)
    tasks = [{"prompt": f"task {i}"} for i in range(64)]
    args = {
        "num_iterations": 1,
        "max_new_tokens": 2,
        "preference_num_candidates": 2,
        "collection_batch_size": batch,
        "rollout_buffer_size": 64,
    }
    make_iterative(args, train_dataset=tasks).train()
    assert calls == [64 // batches] * (4 * batches)


def test_collection_batches_change_no_pair(make_iterative, tmp_path: Path) -> None:
    for size in (1, 3):
        args = {"collection_batch_size": size, "preference_replay_dir": str(tmp_path / str(size)), "num_iterations": 1}
        make_iterative(args).train()
    one, all_at_once = (read_iteration(tmp_path / str(size) / "iteration_0001.json") for size in (1, 3))
    assert one == all_at_once


def test_evaluating_more_often_changes_the_trained_weights(make_iterative, held_out, tmp_path: Path) -> None:
    """Pitfall 20: every batch or never gives the same weights and the same files."""
    weights, files, evaluations = [], [], []
    for interval in (0, 1):
        told: list[str] = []
        replay = tmp_path / str(interval)
        trainer = make_iterative(
            {"eval_interval": interval, "preference_replay_dir": str(replay)},
            eval_dataset=held_out,
            metrics_callback=lambda metrics, step, told=told: told.extend(metrics),
        )
        trainer.train()
        weights.append(trainer.team.fingerprint())
        files.append((replay / "iteration_0002.json").read_bytes())
        evaluations.append(told.count("eval/turn_1/reward_mean"))
    assert weights[0] == weights[1] and files[0] == files[1]
    assert evaluations[0] == 0 and evaluations[1] >= 4


class Interrupted(Exception):
    pass


HARD = {
    "num_iterations": 3,
    "comparator_policy": "history",
    "reference": "initial",
    "preference_replay_mode": "all_history",
    "preference_replay_sample_size": 8,
    "preference_replay_dir": None,
}


def test_resuming_gives_another_run(make_iterative, tmp_path: Path) -> None:
    """Pitfall 26: killed in an update of iteration 3, resumed in a new trainer: same weights, same bytes."""
    unbroken = make_iterative(HARD)
    unbroken.train(checkpoint_dir=tmp_path / "unbroken")

    updates = 0

    def stop(metrics: dict, step: int) -> None:
        nonlocal updates
        if "train/loss" in metrics and len(list_checkpoints(tmp_path / "broken")) == 2:
            updates += 1
            if updates == 2:
                raise Interrupted

    broken = make_iterative({**HARD, "logging_steps": 1}, metrics_callback=stop)
    with pytest.raises(Interrupted):
        broken.train(checkpoint_dir=tmp_path / "broken")
    assert [path.name for path in list_checkpoints(tmp_path / "broken")] == ["iteration_0001", "iteration_0002"]

    resumed = make_iterative(HARD)
    resumed.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "broken")
    assert resumed.team.fingerprint() == unbroken.team.fingerprint()
    assert resumed.environment_steps == unbroken.environment_steps
    files = sorted(path.relative_to(tmp_path / "unbroken") for path in (tmp_path / "unbroken").rglob("*.json"))
    assert any(path.parts[0] == "replay" for path in files) and any(path.name == "manifest.json" for path in files)
    for path in files:
        assert (tmp_path / "broken" / path).read_bytes() == (tmp_path / "unbroken" / path).read_bytes(), path


def test_a_run_is_made_longer_from_its_checkpoint_alone(make_iterative, tmp_path: Path) -> None:
    """Two iterations and two more are four; the checkpoint's folder is enough to go on."""
    four = make_iterative({"num_iterations": 4, "preference_replay_dir": None})
    four.train(checkpoint_dir=tmp_path / "four")
    make_iterative({"preference_replay_dir": None}).train(checkpoint_dir=tmp_path / "two")
    more = make_iterative({"num_iterations": 4, "preference_replay_dir": None})
    more.train(resume_from_checkpoint=str(tmp_path / "two" / "iteration_0002"))
    assert more.team.fingerprint() == four.team.fingerprint()
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == [f"iteration_{n:04d}" for n in range(1, 5)]


@pytest.mark.parametrize("changes", [{"dpo_beta": 0.2}, {"seed": 1}, {"preference_num_candidates": 5}], ids=str)
def test_resuming_with_another_setting_is_refused_by_name(make_iterative, tmp_path: Path, changes: dict) -> None:
    base = {"num_iterations": 1, "preference_replay_dir": None}
    make_iterative(base).train(checkpoint_dir=tmp_path)
    (name, value), *_ = changes.items()
    with pytest.raises(ConfigError, match=rf"\({name} is {value}, was [\d.]+\)"):
        make_iterative({**base, **changes}).train(resume_from_checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_func", "builtin:length_ratio"),
        ("reward_processor", lambda reward: reward * 2),
        ("train_dataset", [{"prompt": "other"}]),
        ("formatters", "Task: {prompt}"),
    ],
)
def test_resuming_with_other_data_is_refused_by_name(make_iterative, tmp_path: Path, name: str, value) -> None:
    base = {"num_iterations": 1, "preference_replay_dir": None}
    make_iterative(base).train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=name):
        make_iterative(base, **{name: value}).train(resume_from_checkpoint=tmp_path)


def test_resuming_without_the_iteration_files_is_refused(make_iterative, tmp_path: Path) -> None:
    base = {"num_iterations": 1, "preference_replay_dir": None}
    make_iterative(base).train(checkpoint_dir=tmp_path)
    path = tmp_path / "replay" / "iteration_0001.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match=r"iteration_0001\.json: changed"):
        make_iterative(base).train(resume_from_checkpoint=tmp_path)


def test_two_runs_in_one_folder_overwrite_each_others_iteration_files(make_iterative) -> None:
    """Pitfall 27."""
    make_iterative({"num_iterations": 1}).train()
    second = make_iterative({"num_iterations": 1})
    before = second.team.fingerprint()
    with pytest.raises(DataError, match="preference_replay_dir"):
        second.train()
    assert second.team.fingerprint() == before


def test_a_constant_oracle_stops_the_run(make_iterative, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pitfall 21: no pairs, ties counted, a clean end, and later iterations run."""
    told: list[dict] = []
    trainer = make_iterative(
        {"num_iterations": 3, "preference_replay_mode": "all_history"},
        reward_func=lambda a, b: [0.5] * len(a),
        metrics_callback=lambda metrics, step: told.append(metrics),
    )
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.fingerprint() == before and trainer.environment_steps == 0
    for iteration in (1, 2, 3):
        counts = read_meta(tmp_path / "replay", iteration)["counts"]
        assert counts["pairs"] == 0 and counts["ties"] + counts["duplicates"] == counts["pairs_possible"] == 12
        assert counts["ties"] > 0
    assert len(told) == 3 and all(metrics["collect/pairs"] == 0.0 for metrics in told)
    assert "no pairs to learn from" in caplog.text


def test_an_oracle_that_wakes_up_later_is_learned_from(make_iterative, tmp_path: Path) -> None:
    """Pitfall 21: an iteration without pairs is not eligible for replay, and stops nothing."""
    calls = []

    def reward(a, b):
        calls.append(1)
        return [0.5 if len(calls) == 1 else float(len(x)) for x in a]

    trainer = make_iterative(
        {"num_iterations": 2, "preference_replay_mode": "nearest_k", "preference_replay_k": 2}, reward_func=reward
    )
    trainer.train()
    second = len(read_iteration(tmp_path / "replay" / "iteration_0002.json"))
    assert second > 0 and trainer.environment_steps == 2 * second


def test_one_nan_reward_removes_a_whole_group_silently(make_iterative, tmp_path: Path) -> None:
    """Pitfall 13: it fails by name, or leaves that one joint response out and counts it."""

    def one_bad(a, b):
        return [math.nan if i == 1 else float(len(x)) for i, x in enumerate(a)]

    with pytest.raises(RewardError, match=r"one_bad returned nan for task .*on_bad_reward: drop"):
        make_iterative({"preference_replay_dir": str(tmp_path / "fail")}, reward_func=one_bad).train()
    make_iterative({"on_bad_reward": "drop", "num_iterations": 1}, reward_func=one_bad).train()
    counts = read_meta(tmp_path / "replay", 1)["counts"]
    # Three tasks with four comparisons each, one of them without its partner.
    assert (counts["dropped"], counts["unmatched"], counts["pairs_possible"]) == (1, 1, 11)


def test_files_do_not_depend_on_how_the_reward_was_named(make_iterative, tmp_path: Path) -> None:
    for name, reward in (("function", length_ratio), ("text", "builtin:length_ratio")):
        args = {"num_iterations": 1, "preference_replay_dir": str(tmp_path / name)}
        make_iterative(args, reward_func=reward).train()
    for file in ("iteration_0001.json", "iteration_0001.meta.json"):
        assert (tmp_path / "function" / file).read_bytes() == (tmp_path / "text" / file).read_bytes()
    label = json.loads((tmp_path / "text" / "iteration_0001.meta.json").read_text())["oracle"]
    assert label.startswith("length_ratio@")


def test_checkpoints_at_intervals_and_no_more_than_asked(make_iterative, tmp_path: Path) -> None:
    trainer = make_iterative({"num_iterations": 5, "preference_replay_dir": None})
    trainer.train(checkpoint_dir=tmp_path, checkpoint_interval=2, checkpoint_total_limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["iteration_0004", "iteration_0005"]
    manifest = Manifest.read(tmp_path / "iteration_0005" / "manifest.json")
    assert manifest.iteration == 5 and manifest.environment_steps == trainer.environment_steps


@pytest.mark.parametrize("given", [{"checkpoint_interval": 0}, {"checkpoint_total_limit": 0}], ids=str)
def test_impossible_checkpointing_fails_before_training(make_iterative, tmp_path: Path, given: dict) -> None:
    trainer = make_iterative()
    with pytest.raises(ConfigError, match=next(iter(given))):
        trainer.train(checkpoint_dir=tmp_path / "c", **given)
    assert not (tmp_path / "replay").exists()


@pytest.mark.parametrize("optimizer_state", ["carry", "reset"])
def test_moments_carry_over_or_begin_anew(make_iterative, optimizer_state: str) -> None:
    trainer = make_iterative({"optimizer_state": optimizer_state})
    engines = list(trainer.engines)
    trainer.train()
    assert (trainer.engines[0] is engines[0]) == (optimizer_state == "carry")


def test_metrics_are_told_over_environment_steps(make_iterative, held_out) -> None:
    told: list[tuple[int, dict]] = []
    trainer = make_iterative(
        {"logging_steps": 1, "eval_interval": 16},
        eval_dataset=held_out,
        metrics_callback=lambda metrics, step: told.append((step, metrics)),
    )
    trainer.train()
    steps = [step for step, _ in told]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == trainer.environment_steps
    names = {name for _, metrics in told for name in metrics}
    for name in ("turn_1/reward_mean", "turn_1/expected_return", "train/loss", "train/grad_norm", "collect/ties"):
        assert name in names
    # Batch index 0 of each iteration alone is divisible by 16.
    assert sum("eval/turn_1/reward_mean" in metrics for _, metrics in told) == 2


def test_logging_steps_count_environment_steps(make_iterative) -> None:
    """With logging_steps 16 an update is told when it passes a multiple of 16 environment steps."""
    logged: dict[int, list[int]] = {}
    for every in (1, 16):
        told: list[int] = []
        args = {"num_iterations": 1, "logging_steps": every, "preference_replay_dir": None}
        make_iterative(
            args, metrics_callback=lambda m, step, told=told: told.append(step) if "train/loss" in m else None
        ).train()
        logged[every] = told
    crossed = [step for before, step in zip([0, *logged[1]], logged[1], strict=False) if step // 16 > before // 16]
    assert len(logged[1]) > 2 and logged[16] == crossed


def test_an_agent_of_a_colder_sampler_is_told_about(make_iterative, caplog: pytest.LogCaptureFixture) -> None:
    make_iterative({"top_p": 0.6, "top_k": 50})
    assert "truncate the sampler" in caplog.text


def test_the_initial_and_the_previous_team_are_other_references(make_iterative) -> None:
    """They are the same team in the first iteration, and no longer in the second."""
    weights = []
    for count in (1, 2):
        trainers = [
            make_iterative({"reference": reference, "num_iterations": count, "preference_replay_dir": None})
            for reference in ("initial", "previous")
        ]
        for trainer in trainers:
            trainer.train()
        weights.append([trainer.team.fingerprint() for trainer in trainers])
    assert weights[0][0] == weights[0][1] and weights[1][0] != weights[1][1]
