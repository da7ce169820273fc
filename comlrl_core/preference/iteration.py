"""One iteration's pairs: made from scored candidates, written to its file, drawn again for training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.config.fields import ReplayFields
from comlrl_core.files import sha256_file
from comlrl_core.preference.candidates import JointResponse, TaskCandidates
from comlrl_core.preference.files import write_iteration
from comlrl_core.preference.pairing import PairingResult, make_pairs
from comlrl_core.preference.replay import ReplaySample, ReplaySettings, sample_replay
from comlrl_core.preference.scoring import reward_distribution
from comlrl_core.rewards.contract import Oracle
from comlrl_core.store import IterationEntry

HISTOGRAM_BINS = 20


def write_pairs(
    folder: Path,
    iteration: int,
    candidates: Sequence[TaskCandidates],
    oracle: Oracle,
    config: MADPOConfig,
    *,
    policy: str,
    comparator: str | None,
) -> tuple[PairingResult, IterationEntry]:
    """Pair the scored `candidates`, and write the iteration file and its meta file into `folder`.

    `policy` is the digest of the answering team's weights, `comparator` says who answered on the other side (None for
    the offline algorithm). Returns the pairs with their counts, and the entry for the manifest.
    """
    pairing = make_pairs(
        candidates,
        selection=config.pair_selection,
        pairs_per_sample=config.preference_pairs_per_sample,
        iterative=config.is_iterative(),
        min_reward_gap=config.min_reward_gap,
        oracle=oracle.label,
        stream=(config.seed, iteration, "pair"),
    )
    current = [joint for task in candidates for joint in task.current]
    other = [joint for task in candidates for joint in task.comparator or []]
    meta: dict[str, Any] = {
        "seed": config.seed,
        "oracle": oracle.label,
        "policy": policy,
        "comparator": comparator,
        "counts": pairing.counts,
        "rewards": {
            "current": _rewards(current, oracle, config),
            "comparator": _rewards(other, oracle, config) if config.is_iterative() else None,
        },
    }
    path, _ = write_iteration(folder, iteration, pairing.records, meta)
    return pairing, IterationEntry(iteration, len(pairing.records), sha256_file(path))


def draw_pairs(folder: Path, iteration: int, eligible: Sequence[int], config: MADPOConfig) -> ReplaySample:
    """The pairs that `iteration` trains on; its own file must be in `folder` already."""
    settings = ReplaySettings()
    if isinstance(config, ReplayFields):
        settings = ReplaySettings(
            mode=config.preference_replay_mode,
            k=config.preference_replay_k,
            lam=config.preference_replay_lambda,
            sample_size=config.preference_replay_sample_size,
        )
    return sample_replay(folder, iteration, eligible, settings, (config.seed, iteration, "sample"))


def collection_metrics(meta: Mapping[str, Any]) -> dict[str, float]:
    """What a meta file says about the collection, as metrics: rewards of both sides and how candidates became pairs."""
    metrics = {f"collect/{name}": float(count) for name, count in meta["counts"].items()}
    for side, distribution in meta["rewards"].items():
        for name, value in (distribution or {}).items():
            if name != "histogram":
                metrics[f"collect/{side}/reward_{name}"] = float(value)
    mean = (meta["rewards"]["current"] or {}).get("mean")
    if mean is not None:
        metrics["turn_1/reward_mean"] = metrics["turn_1/expected_return"] = float(mean)
    return metrics


def _rewards(responses: Sequence[JointResponse], oracle: Oracle, config: MADPOConfig) -> dict[str, Any] | None:
    distribution: dict[str, Any] | None = reward_distribution(responses)
    if distribution is None or not getattr(config, "log_reward_distribution", False) or oracle.reward_range is None:
        return distribution
    low, high = oracle.reward_range
    counts = [0] * HISTOGRAM_BINS
    for response in responses:
        if response.reward is not None:
            share = (response.reward - low) / (high - low)
            counts[min(HISTOGRAM_BINS - 1, max(0, int(share * HISTOGRAM_BINS)))] += 1
    return {**distribution, "histogram": {"low": low, "high": high, "counts": counts}}
