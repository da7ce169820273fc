"""One iteration's pairs: written with what is known about them, and drawn again."""

from pathlib import Path

import pytest

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.files import sha256_file
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.preference.files import iteration_path, meta_path, read_iteration, read_meta
from comlrl_core.preference.iteration import HISTOGRAM_BINS, collection_metrics, draw_pairs, write_pairs
from comlrl_core.rewards.contract import Oracle


def joint(index: int, source: str, reward: float | None) -> JointResponse:
    texts = (f"{source}{index}", f"{source}{index}!")
    completions = tuple(Completion(text, (3, index + 3, 1), True) for text in texts)
    return JointResponse(index, source, completions, reward, reward, dropped=reward is None)


def task(name: str, own: list, other: list | None = None) -> TaskCandidates:
    return TaskCandidates(
        name,
        {"prompt": name},
        (name, name),
        [joint(i, "current", reward) for i, reward in enumerate(own)],
        None if other is None else [joint(i, "history", reward) for i, reward in enumerate(other)],
    )


# Task a: 0.2 < 0.6 and a tie. Task b: 0.9 > 0.1, and a bad reward.
ITERATIVE = [task("a", [0.2, 0.5], [0.6, 0.5]), task("b", [0.9, None], [0.1, 0.3])]


def judge() -> Oracle:
    def score(first, second):
        return [0.0] * len(first)

    score.reward_range = (0.0, 1.0)
    return Oracle(score, 2, name="judge", version="12ab")


def write(folder: Path, iteration: int, config: MADPOConfig, candidates=ITERATIVE):
    return write_pairs(folder, iteration, candidates, judge(), config, policy="p" * 8, comparator="iteration_0000")


def test_pairs_and_what_is_known_about_them_are_written(tmp_path: Path) -> None:
    pairing, entry = write(tmp_path, 1, MADPOIterConfig(seed=7))
    records = read_iteration(iteration_path(tmp_path, 1))
    assert records == pairing.records and len(records) == 2
    assert [(r.winner_reward, r.loser_reward, r.winner_source) for r in records] == [
        (0.6, 0.2, "comparator"),
        (0.9, 0.1, "current"),
    ]
    assert all(record.oracle == "judge@12ab" for record in records)
    assert (entry.iteration, entry.num_pairs) == (1, 2)
    assert entry.digest == sha256_file(iteration_path(tmp_path, 1))
    meta = read_meta(tmp_path, 1)
    expected = {"seed": 7, "oracle": "judge@12ab", "policy": "p" * 8, "comparator": "iteration_0000"}
    assert {key: meta[key] for key in expected} == expected
    counts = {"tasks": 2, "candidates": 8, "dropped": 1, "ties": 1, "unmatched": 1, "pairs": 2}
    assert {key: meta["counts"][key] for key in counts} == counts
    assert meta["rewards"]["current"]["count"] == 3
    assert meta["rewards"]["current"]["mean"] == pytest.approx(1.6 / 3)
    assert meta["rewards"]["comparator"]["mean"] == pytest.approx(1.5 / 4)
    assert "histogram" not in meta["rewards"]["current"]


def test_the_same_candidates_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, 3, MADPOIterConfig())
    for path in (iteration_path, meta_path):
        assert path(tmp_path / "one", 3).read_bytes() == path(tmp_path / "two", 3).read_bytes()


def test_a_histogram_on_request(tmp_path: Path) -> None:
    """20 bins of 0.05 on [0, 1]: 0.2 falls into number 4, 0.5 into 10, 0.9 into 18."""
    write(tmp_path, 1, MADPOIterConfig(log_reward_distribution=True))
    histogram = read_meta(tmp_path, 1)["rewards"]["current"]["histogram"]
    assert (histogram["low"], histogram["high"], len(histogram["counts"])) == (0.0, 1.0, HISTOGRAM_BINS)
    assert [i for i, count in enumerate(histogram["counts"]) if count] == [4, 10, 18]


def test_offline_pairs_leave_the_other_side_out(tmp_path: Path) -> None:
    config = MADPOConfig(preference_pairs_per_sample=None)
    pairing, _ = write(tmp_path, 1, config, [task("a", [0.1, 0.3, 0.2])])
    assert [(r.winner_reward, r.loser_reward) for r in pairing.records] == [(0.3, 0.1), (0.2, 0.1), (0.3, 0.2)]
    assert all(record.raw_rewards is None for record in pairing.records)
    assert read_meta(tmp_path, 1)["rewards"]["comparator"] is None


def test_metrics_of_a_collection(tmp_path: Path) -> None:
    write(tmp_path, 1, MADPOIterConfig(log_reward_distribution=True))
    metrics = collection_metrics(read_meta(tmp_path, 1))
    assert metrics["collect/pairs"] == 2.0 and metrics["collect/ties"] == 1.0
    assert metrics["turn_1/reward_mean"] == metrics["turn_1/expected_return"] == pytest.approx(1.6 / 3)
    assert metrics["collect/comparator/reward_max"] == 0.6
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_collection_of_bad_rewards_has_counts_alone(tmp_path: Path) -> None:
    write(tmp_path, 1, MADPOIterConfig(), [task("a", [None], [None])])
    metrics = collection_metrics(read_meta(tmp_path, 1))
    assert metrics["collect/dropped"] == 2.0 and "turn_1/reward_mean" not in metrics


def test_a_constant_oracle_stops_the_run(tmp_path: Path) -> None:
    """Pitfall 21: no pair, a count of ties, a valid file, and nothing to draw."""
    config = MADPOIterConfig()
    pairing, entry = write(tmp_path, 1, config, [task("a", [0.5, 0.5], [0.5, 0.5])])
    assert pairing.records == [] and entry.num_pairs == 0
    assert pairing.counts["ties"] == pairing.counts["pairs_possible"] == 2
    assert draw_pairs(tmp_path, 1, [], config).records == []


def test_draws_follow_the_replay_settings(tmp_path: Path) -> None:
    for iteration in (1, 2):
        write(tmp_path, iteration, MADPOIterConfig())
    current = draw_pairs(tmp_path, 2, [1], MADPOIterConfig())
    assert current.counts == {2: 2} and current.records == read_iteration(iteration_path(tmp_path, 2))
    replay = {"preference_replay_mode": "lambda_decay", "preference_replay_sample_size": 40}
    newest = draw_pairs(tmp_path, 2, [1], MADPOIterConfig(**replay, preference_replay_lambda=0.0))
    assert newest.counts == {1: 0, 2: 40}
    equal = draw_pairs(tmp_path, 2, [1], MADPOIterConfig(**replay, preference_replay_lambda=1.0))
    assert sum(equal.counts.values()) == 40 and min(equal.counts.values()) > 8
    again = draw_pairs(tmp_path, 2, [1], MADPOIterConfig(**replay, preference_replay_lambda=1.0))
    assert again == equal
    other = MADPOIterConfig(**replay, preference_replay_lambda=1.0, seed=1)
    assert draw_pairs(tmp_path, 2, [1], other).records != equal.records


def test_an_offline_run_draws_its_one_file(tmp_path: Path) -> None:
    config = MADPOConfig()
    write(tmp_path, 1, config, [task("a", [0.1, 0.3])])
    assert draw_pairs(tmp_path, 1, [], config).counts == {1: 1}
