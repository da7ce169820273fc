"""`MADPOTrainer`: one collection, then epochs over its pairs."""

from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.preference.files import list_iterations, read_iteration, read_meta
from comlrl_core.trainers.checkpoints import list_checkpoints


def test_pairs_are_collected_once_and_learned_from_in_epochs(make_offline, tmp_path: Path) -> None:
    trainer = make_offline({"num_train_epochs": 3})
    before = trainer.team.fingerprint()
    trainer.train(checkpoint_dir=tmp_path)
    assert trainer.team.fingerprint() != before
    assert list_iterations(tmp_path / "replay") == [1]
    records = read_iteration(tmp_path / "replay" / "iteration_0001.json")
    assert trainer.environment_steps == 3 * 2 * len(records)
    assert all(record.raw_rewards is None for record in records)  # the published record of one side alone
    assert read_meta(tmp_path / "replay", 1)["comparator"] is None
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_0001", "epoch_0002", "epoch_0003"]


@pytest.mark.parametrize("reference", ["initial", "previous"])
def test_two_epochs_and_two_more_are_four(make_offline, tmp_path: Path, reference: str) -> None:
    """Pitfall 26: from the checkpoint, in a new trainer, the same weights as four epochs at once."""
    four = make_offline({"num_train_epochs": 4, "reference": reference})
    four.train(checkpoint_dir=tmp_path / "four")
    make_offline({"reference": reference}).train(checkpoint_dir=tmp_path / "two")
    more = make_offline({"num_train_epochs": 4, "reference": reference})
    more.train(resume_from_checkpoint=str(tmp_path / "two" / "epoch_0002"), checkpoint_dir=str(tmp_path / "two"))
    assert more.team.fingerprint() == four.team.fingerprint()
    assert more.environment_steps == four.environment_steps
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == [f"epoch_{n:04d}" for n in range(1, 5)]


def test_a_checkpoint_goes_on_under_another_name(make_offline, tmp_path: Path) -> None:
    four = make_offline({"num_train_epochs": 4})
    four.train(checkpoint_dir=tmp_path / "four")
    make_offline().train(checkpoint_dir=tmp_path / "two")
    (tmp_path / "two" / "epoch_0001").rename(tmp_path / "two" / "kept")
    more = make_offline({"num_train_epochs": 4})
    more.train(resume_from_checkpoint=tmp_path / "two" / "kept")
    assert more.team.fingerprint() == four.team.fingerprint()


def test_a_finished_run_has_nothing_left_to_do(make_offline, tmp_path: Path) -> None:
    first = make_offline()
    first.train(checkpoint_dir=tmp_path)
    again = make_offline()
    again.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path)
    assert again.team.fingerprint() == first.team.fingerprint()


def test_a_decaying_learning_rate_ties_a_run_to_its_length(make_offline, tmp_path: Path) -> None:
    """Its two epochs ended at a rate of 0: two more would train nothing, silently."""
    args = {"lr_schedule": "linear"}
    make_offline(args).train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match="num_train_epochs is 4, was 2"):
        make_offline({**args, "num_train_epochs": 4}).train(resume_from_checkpoint=tmp_path)
    make_offline(args).train(resume_from_checkpoint=tmp_path / "epoch_0001")


def test_resuming_with_another_setting_is_refused_by_name(make_offline, tmp_path: Path) -> None:
    make_offline().train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"dpo_beta is 0\.3, was 0\.1"):
        make_offline({"dpo_beta": 0.3}).train(resume_from_checkpoint=tmp_path)


def test_two_runs_in_one_folder_overwrite_each_others_iteration_files(make_offline, tmp_path: Path) -> None:
    """Pitfall 27."""
    make_offline().train(checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match="already holds iteration files"):
        make_offline().train(checkpoint_dir=tmp_path)


@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_every_selection_of_pairs_runs(make_offline, tmp_path: Path, selection: str) -> None:
    most = None if selection == "all" else 2
    make_offline({"pair_selection": selection, "preference_pairs_per_sample": most}).train(checkpoint_dir=tmp_path)
    counts = read_meta(tmp_path / "replay", 1)["counts"]
    assert counts["pairs_possible"] == 3 * 6  # 4 candidates of 3 tasks, each two once
    assert counts["pairs"] == (6 if most else counts["pairs_possible"] - counts["ties"] - counts["duplicates"])


def test_a_constant_oracle_stops_the_run(make_offline, tmp_path: Path) -> None:
    """Pitfall 21."""
    trainer = make_offline(reward_func=lambda a, b: [1.0] * len(a))
    before = trainer.team.fingerprint()
    trainer.train(checkpoint_dir=tmp_path)
    assert trainer.team.fingerprint() == before
    assert read_meta(tmp_path / "replay", 1)["counts"]["pairs"] == 0


def test_evaluating_more_often_changes_the_trained_weights(make_offline, held_out) -> None:
    """Pitfall 20."""
    weights = []
    for interval in (0, 1):
        trainer = make_offline({"eval_interval": interval}, eval_dataset=held_out)
        trainer.train()
        weights.append(trainer.team.fingerprint())
    assert weights[0] == weights[1]


def test_an_evaluation_begins_every_epoch(make_offline, held_out) -> None:
    told: list[str] = []
    trainer = make_offline(
        {"eval_interval": 1000, "num_train_epochs": 3},
        eval_dataset=held_out,
        metrics_callback=lambda metrics, step: told.extend(metrics),
    )
    trainer.train()
    assert told.count("eval/turn_1/reward_mean") == 3


def test_checkpoints_at_intervals_and_no_more_than_asked(make_offline, tmp_path: Path) -> None:
    make_offline({"num_train_epochs": 5}).train(
        checkpoint_dir=tmp_path, checkpoint_interval=2, checkpoint_total_limit=2
    )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_0004", "epoch_0005"]
