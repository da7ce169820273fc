"""Fitting: the reward model learns which side of each pair won."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from comlrl_core.engine.processes import even_share, gather_rows
from comlrl_core.engine.protocol import Engine, StepResult
from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.notices import say_once
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model.diagnostics import HeldOut, held_out, held_out_metrics, is_held_out
from comlrl_core.preference.reward_model.encoding import EncodedPair
from comlrl_core.preference.reward_model.model import JointRewardModel
from comlrl_core.progress import progress
from comlrl_core.rl.bradley_terry import bradley_terry_accuracy, bradley_terry_loss
from comlrl_core.team.scoring import scoring_mode

Metrics = dict[str, Any]

NONFINITE_LIMIT = 3  # non-finite minibatches in a row that end a fit although each may be skipped


@dataclass(frozen=True)
class FitSettings:
    """What one fit needs to know.

    Raises:
        ConfigError: a value is out of bounds.
    """

    train_batch_size: int = 1  # pairs per optimizer step
    micro_batch_size: int | None = None  # pairs per forward pass; None = the minibatch. Same result, less memory
    num_train_epochs: int = 1
    center_rewards_coef: float = 0.0
    eval_fraction: float = 0.1  # of the tasks, by a hash of their ids
    on_nonfinite: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        micro = self.micro_batch_size
        checks = {
            "train_batch_size": (self.train_batch_size >= 1, "an integer >= 1"),
            "micro_batch_size": (micro is None or micro >= 1, "None or an integer >= 1"),
            "num_train_epochs": (self.num_train_epochs >= 1, "an integer >= 1"),
            "center_rewards_coef": (
                math.isfinite(self.center_rewards_coef) and self.center_rewards_coef >= 0,
                "a finite number >= 0",
            ),
            "eval_fraction": (0 <= self.eval_fraction < 1, "in [0, 1)"),
            "on_nonfinite": (self.on_nonfinite in ("fail", "skip"), "one of fail, skip"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed is {allowed}")


@dataclass(frozen=True)
class RewardFit:
    """What a fit did.

    Attributes:
        history: metrics of each optimizer step: `loss`, `margin`, `accuracy`, `grad_norm`, `learning_rate`, `pairs`,
            `epoch`, `step`, `skipped`.
        train_pairs: pairs that were learned from; 0 means that the model stayed as it was.
        dropped: pairs left out: `too_long` (responses that do not fit), `equal_sides`.
        held_out: measures on the held-out tasks; None where no pair was held out.
    """

    history: list[Metrics]
    train_pairs: int
    dropped: dict[str, int]
    held_out: HeldOut | None

    def metrics(self) -> dict[str, float]:
        """The fit in one row: held-out measures, training accuracy of the last epoch, counts."""
        row = {"train_pairs": float(self.train_pairs)}
        row |= {f"dropped_{reason}": float(count) for reason, count in self.dropped.items()}
        measured = [m for m in self.history if m["epoch"] == self.history[-1]["epoch"] and not m["skipped"]]
        if measured:
            pairs = sum(m["pairs"] for m in measured)
            row["train_accuracy"] = sum(m["accuracy"] * m["pairs"] for m in measured) / pairs
            row["train_loss"] = sum(m["loss"] * m["pairs"] for m in measured) / pairs
        return row | dict(held_out_metrics(self.held_out))


def fit(
    model: JointRewardModel,
    engine: Callable[[JointRewardModel], Engine],
    records: Sequence[PairRecord],
    settings: FitSettings,
    *,
    order: Callable[[int, int], Sequence[int]],
    on_step: Callable[[Metrics], None] | None = None,
) -> RewardFit:
    """Fit `model` to preference records, all but those of the held-out tasks.

    The loss is the mean over the pairs of the minibatch, however it is split into micro-batches. Dropout is off. A
    held-out pair that replay drew twice counts once. Afterwards the scores of the training pairs have a mean of 0.

    Args:
        model: as loaded, trained in place.
        engine: makes the engine that trains it; not called where there is nothing to learn from.
        records: `P` pairs of the model's number of agents.
        settings: see there.
        order: `order(epoch, n)`: a permutation of `range(n)`, in which epoch `epoch` visits the training pairs.
        on_step: called with the metrics of each minibatch as soon as they exist.

    Raises:
        DataError: a record of another number of agents, or an order that is no permutation.
        TrainingError: a loss or gradient is not finite and `on_nonfinite` is "fail", or this happened in three
            minibatches in a row.
    """
    encoded = model.encoder.encode_pairs(records)
    training, kept_out = _split(encoded.pairs, settings.eval_fraction)
    history = _train(model, engine(model), training, settings, order, on_step) if training else []
    return RewardFit(history, len(training), encoded.dropped, measure(model, kept_out))


def measure(model: JointRewardModel, pairs: Sequence[EncodedPair]) -> HeldOut | None:
    """How the model judges some pairs, each counted once; None without any."""
    distinct = list(dict.fromkeys(pairs))
    scores = torch.tensor(model.score_ids([p.winner for p in distinct] + [p.loser for p in distinct]))
    return held_out(scores[: len(distinct)], scores[len(distinct) :])


def _split(pairs: Sequence[EncodedPair], fraction: float) -> tuple[list[EncodedPair], list[EncodedPair]]:
    kept_out = [pair for pair in pairs if is_held_out(pair.task, fraction)]
    training = [pair for pair in pairs if not is_held_out(pair.task, fraction)]
    if kept_out and not training:
        say_once(
            "reward-model-all-held-out",
            "every task with a pair falls into the reward model's held-out share: it is fitted to all of them and not "
            "measured; give it more tasks, or set reward_eval_fraction: 0",
        )
        return kept_out, []
    return training, kept_out


def _train(
    model: JointRewardModel,
    engine: Engine,
    pairs: Sequence[EncodedPair],
    settings: FitSettings,
    order: Callable[[int, int], Sequence[int]],
    on_step: Callable[[Metrics], None] | None,
) -> list[Metrics]:
    per_epoch = math.ceil(len(pairs) / settings.train_batch_size)
    total = per_epoch * settings.num_train_epochs
    engine.begin(total)
    history: list[Metrics] = []
    in_a_row = 0
    with scoring_mode(model), progress("Reward model", total, "step") as bar:
        model.shift.zero_()
        for epoch in range(settings.num_train_epochs):
            indices = list(order(epoch, len(pairs)))
            if sorted(indices) != list(range(len(pairs))):
                raise DataError(f"the order of epoch {epoch} is no permutation of the {len(pairs)} pairs")
            for step in range(per_epoch):
                batch = indices[step * settings.train_batch_size : (step + 1) * settings.train_batch_size]
                metrics, nonfinite = _train_minibatch(model, engine, [pairs[index] for index in batch], settings)
                metrics |= {"epoch": epoch, "step": epoch * per_epoch + step}
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
                bar.update(1)
                in_a_row = in_a_row + 1 if nonfinite else 0
                if nonfinite and (settings.on_nonfinite == "fail" or in_a_row == NONFINITE_LIMIT):
                    text = f"the {nonfinite} of the reward model is not finite (epoch {epoch}, minibatch {step})"
                    hint = "lower reward_learning_rate, or let on_nonfinite_loss: skip leave such minibatches out"
                    raise TrainingError(f"{text}; {hint}")
    sides = list(dict.fromkeys(side for pair in pairs for side in (pair.winner, pair.loser)))
    model.shift.fill_(math.fsum(model.score_ids(sides)) / len(sides))
    return history


def _train_minibatch(
    model: JointRewardModel, engine: Engine, batch: Sequence[EncodedPair], settings: FitSettings
) -> tuple[Metrics, str]:
    """At most one optimizer step; the metrics, and what was not finite ("" if all was)."""
    by_length = sorted(batch, key=lambda pair: pair.longest)
    size = settings.micro_batch_size or len(batch)
    rows: list[Tensor] = []
    nonfinite = ""
    for start in range(0, len(by_length), size):
        own = even_share(by_length[start : start + size])  # what the other processes do not take, and fillers
        chunk = [pair for pair, _ in own]
        mine = [counts for _, counts in own]
        # One forward for both sides: two before one backward are an error under some sharded engines.
        sides = [pair.winner for pair in chunk] + [pair.loser for pair in chunk]
        winners, losers = engine.model(*model.batch(sides)).chunk(2)
        loss = bradley_terry_loss(winners, losers, settings.center_rewards_coef)
        measured = [loss, winners - losers, bradley_terry_accuracy(winners, losers)]
        found = torch.stack([column.detach().double().cpu() for column in measured], dim=1)
        rows.append(gather_rows(found, mine, len(by_length[start : start + size])))
        if not bool(rows[-1].isfinite().all()):
            nonfinite = "loss"
            break
        engine.backward((loss * torch.tensor(mine).to(loss)).sum() / len(batch))
    if nonfinite:
        engine.zero_grad()
        result = StepResult(math.nan, 0.0, skipped=True)
    else:
        result = engine.step()
        nonfinite = "gradient" if result.skipped else ""
    means = torch.cat(rows).mean(dim=0).tolist()
    metrics: Metrics = dict(zip(("loss", "margin", "accuracy"), means, strict=True))
    return metrics | {
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "pairs": len(batch),
        "skipped": int(result.skipped),
    }, nonfinite
