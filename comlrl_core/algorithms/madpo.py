"""MADPO: direct preference optimisation of a whole team. A pair's margin is the sum of its agents' margins.

    D_i = log pi_i(winner_i | prompt_i) - log pi_i(loser_i | prompt_i)
    D = sum_i D_i
    loss = -log sigmoid(beta D)

The gradient of agent i is `-beta sigmoid(-beta D) grad D_i`: the weight is the team's, the direction its own.
With a reference, its margins are subtracted; with one agent this is then DPO (arXiv 2305.18290).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from comlrl_core.algorithms.shared import NONFINITE_LIMIT, Metrics
from comlrl_core.engine.processes import even_share, gather_rows
from comlrl_core.engine.protocol import Engine, StepResult, agents_by_engine
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.progress import progress
from comlrl_core.rl.logprobs import mean_logprobs, sequence_logprobs
from comlrl_core.rl.preference import LossType, preference_accuracy, preference_loss
from comlrl_core.team.scoring import score_completions, scoring_mode

Ids = tuple[int, ...]


@dataclass(frozen=True)
class PairTokens:
    """One preference pair as token ids; every field holds one sequence per agent, in agent order.

    Completion ids end with the end-of-sequence id where the completion has ended.
    """

    prompts: tuple[Ids, ...]
    winners: tuple[Ids, ...]
    losers: tuple[Ids, ...]

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.winners) == len(self.losers) >= 1:
            counts = f"{len(self.prompts)} prompts, {len(self.winners)} winners, {len(self.losers)} losers"
            raise DataError(f"a pair needs one prompt, winner and loser per agent; it has {counts}")

    @property
    def scored_tokens(self) -> int:
        """Completion tokens of both sides, over all agents."""
        return sum(map(len, self.winners)) + sum(map(len, self.losers))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a forward pass sees of this pair."""
        rows = zip(self.prompts, self.winners, self.losers, strict=True)
        return max(len(prompt) + max(len(winner), len(loser)) for prompt, winner, loser in rows)


@dataclass(frozen=True)
class MADPOUpdateSettings:
    """What one call of `update` needs to know.

    Raises:
        ConfigError: a value is out of bounds.
    """

    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    train_batch_size: int = 16  # pairs per optimizer step
    micro_batch_size: int | None = None  # pairs per forward pass; None = the minibatch. Same result, less memory
    num_train_epochs: int = 1
    on_nonfinite: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        micro = self.micro_batch_size
        checks = {
            "beta": (math.isfinite(self.beta) and self.beta > 0, "a finite number > 0"),
            "loss_type": (self.loss_type in get_args(LossType), f"one of {', '.join(get_args(LossType))}"),
            "label_smoothing": (0 <= self.label_smoothing < 0.5, "in [0, 0.5)"),
            "train_batch_size": (self.train_batch_size >= 1, "an integer >= 1"),
            "micro_batch_size": (micro is None or micro >= 1, "None or an integer >= 1"),
            "num_train_epochs": (self.num_train_epochs >= 1, "an integer >= 1"),
            "on_nonfinite": (self.on_nonfinite in ("fail", "skip"), "one of fail, skip"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed is {allowed}")

    @property
    def normalised(self) -> bool:
        """IPO compares per-token means; the other losses compare sums."""
        return self.loss_type == "ipo"


def pair_margins(
    model: nn.Module, pairs: Sequence[PairTokens], agent: int, pad_id: int, normalised: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Margins of one agent, from one forward pass over its winners and losers together.

    Two forward passes before one backward are an error under some sharded engines, and slower everywhere.

    Args:
        model: the agent's policy, already in `scoring_mode`.
        pairs: `B` pairs.
        agent: whose sequences to score.
        pad_id: fills the batch; any valid id.
        normalised: margins of per-token means (IPO) instead of sums.

    Returns:
        `margin`, and the summed log-probabilities of winners and of losers (always sums), each `[B]`.
    """
    prompts = [pair.prompts[agent] for pair in pairs]
    completions = [pair.winners[agent] for pair in pairs] + [pair.losers[agent] for pair in pairs]
    token_logprobs, mask = score_completions(model, prompts * 2, completions, pad_id=pad_id)
    winners, losers = sequence_logprobs(token_logprobs, mask).chunk(2)
    if not normalised:
        return winners - losers, winners, losers
    mean_winners, mean_losers = mean_logprobs(token_logprobs, mask).chunk(2)
    return mean_winners - mean_losers, winners, losers


@torch.no_grad()
def reference_margins(
    models: Sequence[nn.Module],
    pairs: Sequence[PairTokens],
    pad_ids: Sequence[int],
    batch_size: int,
    normalised: bool = False,
) -> Tensor:
    """The margins that a frozen team gives to `P` pairs, to be subtracted from the trained team's.

    Args:
        models, pad_ids: one per agent, in agent order.
        pairs: `P` pairs.
        batch_size: pairs per forward pass.
        normalised: per-token means; `MADPOUpdateSettings.normalised` of the update that will use them.

    Returns:
        `[P, N]` on the CPU, fp32 (or fp64), without a graph.
    """
    # Neighbours in length share a batch, which saves pads. A row does not depend on its batch.
    by_length = sorted(range(len(pairs)), key=lambda index: pairs[index].longest)
    result: Tensor | None = None
    with gathered(*models), scoring_mode(*models), progress("Reference margins", len(pairs), "pair") as bar:
        for indices in _chunks(by_length, batch_size):
            own = even_share(indices)
            chunk = [pairs[index] for index, _ in own]
            columns = [
                pair_margins(model, chunk, agent, pad_id, normalised)[0].cpu()
                for agent, (model, pad_id) in enumerate(zip(models, pad_ids, strict=True))
            ]
            margins = gather_rows(torch.stack(columns, dim=1), [mine for _, mine in own], len(indices))
            result = margins.new_empty(len(pairs), len(models)) if result is None else result
            result[indices] = margins
            bar.update(len(indices))
    return torch.empty(0, len(models)) if result is None else result


def num_steps(num_pairs: int, settings: MADPOUpdateSettings) -> int:
    """Optimizer steps of one `update` over `num_pairs` pairs."""
    return settings.num_train_epochs * math.ceil(num_pairs / settings.train_batch_size)


def update(
    models: Sequence[nn.Module],
    engines: Sequence[Engine],
    pad_ids: Sequence[int],
    pairs: Sequence[PairTokens],
    settings: MADPOUpdateSettings,
    *,
    reference: Tensor | None,
    order: Callable[[int], Sequence[int]],
    on_step: Callable[[Metrics], None] | None = None,
    start_epoch: int = 0,
) -> list[Metrics]:
    """Trains the team on `P` preference pairs.

    Every margin of a minibatch comes from the same parameters; then each engine goes one step. The loss is
    the mean over the pairs of the minibatch, however it is split into micro-batches. Dropout is off. The
    learning-rate schedule begins anew with epoch 0; with a later `start_epoch` it goes on from the engines'
    loaded state.

    Args:
        models: what is called, one per agent; agents may share one.
        engines: one per agent, the same object where the model is the same.
        pad_ids: one per agent.
        pairs: `P` pairs of `N` agents each.
        settings: see there.
        reference: `reference_margins` of these pairs, `[P, N]`, or None (the published form has none).
        order: indices into `pairs` in the order in which epoch `e` visits them.
        on_step: called with the metrics of each minibatch as soon as they exist.
        start_epoch: first epoch to train (those before were trained by an interrupted run).

    Returns:
        The metrics of each minibatch: `loss`, `margin` (joint, reference subtracted), `accuracy`,
        `winner_logps`, `loser_logps` (sums over tokens and agents, means over pairs), `agent_{i}/margin`,
        `agent_{i}/grad_norm`, `grad_norm` (before clipping), `learning_rate`, `pairs`, `masked_pairs` (left
        out: no token to score on either side), `epoch`, `step`, `skipped` (1: no engine was stepped, or one
        was left out). The measured values of a skipped minibatch may be NaN.

    Raises:
        DataError: pairs, reference or order do not belong together.
        TrainingError: a loss or gradient is not finite and `on_nonfinite` is "fail", or this
            happened in three minibatches in a row.
    """
    _check(models, engines, pad_ids, pairs, reference)
    if not pairs:
        return []
    if start_epoch == 0:
        for engine, _ in agents_by_engine(engines):
            engine.begin(num_steps(len(pairs), settings))

    history: list[Metrics] = []
    nonfinite_in_a_row = 0
    per_epoch = math.ceil(len(pairs) / settings.train_batch_size)
    total = per_epoch * (settings.num_train_epochs - start_epoch)
    with scoring_mode(*models), progress("MADPO update", total, "step") as bar:
        for epoch in range(start_epoch, settings.num_train_epochs):
            indices = list(order(epoch))
            if sorted(indices) != list(range(len(pairs))):
                raise DataError(f"the order of epoch {epoch} is no permutation of the {len(pairs)} pairs")
            for step, batch in enumerate(_chunks(indices, settings.train_batch_size)):
                result = _train_minibatch(models, engines, pad_ids, pairs, batch, settings, reference)
                metrics, nonfinite = result
                metrics |= {"epoch": epoch, "step": epoch * per_epoch + step}
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
                bar.update(1)
                nonfinite_in_a_row = nonfinite_in_a_row + 1 if nonfinite else 0
                if nonfinite and (settings.on_nonfinite == "fail" or nonfinite_in_a_row == NONFINITE_LIMIT):
                    raise TrainingError(_nonfinite_message(nonfinite, epoch, step, batch, nonfinite_in_a_row))
    return history


def falling_logps_warning(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Says what to try when the team came to find the winners *and* the losers less likely.

    The loss only sees their difference, so both may fall while it improves, and the probability goes to texts
    that nobody compared. Compared are the means over the first and the last third of the minibatches; a fall
    counts when it exceeds two standard errors, as different minibatches hold different texts.

    Args:
        history: metrics of `update`, in order; skipped minibatches are ignored.

    Returns:
        The warning, or None.
    """
    measured = [metrics for metrics in history if not metrics["skipped"]]
    third = len(measured) // 3
    if third == 0:
        return None
    falls = {}
    for side in ("winner_logps", "loser_logps"):
        values = torch.tensor([metrics[side] for metrics in measured], dtype=torch.float64)
        first, last = values[:third], values[-third:]
        standard_error = math.sqrt((first.var(correction=0) + last.var(correction=0)).item() / third)
        falls[side] = (first.mean() - last.mean()).item()
        if falls[side] <= 2 * standard_error:
            return None
    won, lost = falls["winner_logps"], falls["loser_logps"]
    won, lost = falls["winner_logps"], falls["loser_logps"]
    return (
        f"the log-probabilities of winners and losers both fell (by {won:.3g} and {lost:.3g}): probability"
        " moves to texts outside of the pairs. Try a reference (reference: initial), a larger dpo_beta, a"
        " smaller learning rate or a minimum reward gap (min_reward_gap)"
    )


def _train_minibatch(
    models: Sequence[nn.Module],
    engines: Sequence[Engine],
    pad_ids: Sequence[int],
    pairs: Sequence[PairTokens],
    batch: Sequence[int],
    settings: MADPOUpdateSettings,
    reference: Tensor | None,
) -> tuple[Metrics, str]:
    """At most one optimizer step of every engine; the metrics, and what was not finite ("" if all was)."""
    groups = agents_by_engine(engines)
    # By length: neighbours share a micro-batch, which saves pads. The sum does not depend on the order.
    live = sorted((i for i in batch if pairs[i].scored_tokens), key=lambda i: pairs[i].longest)
    rows: list[Tensor] = []
    nonfinite = ""
    for indices in _chunks(live, settings.micro_batch_size or len(batch)):
        own = even_share(indices)  # what the other processes do not take; fillers count for nothing
        chunk = [pairs[index] for index, _ in own]
        scored = [
            pair_margins(engine.model, chunk, i, pad_ids[i], settings.normalised) for i, engine in enumerate(engines)
        ]
        margins, winners, losers = (list(column) for column in zip(*scored, strict=True))
        if reference is not None:
            places = [index for index, _ in own]
            margins = [margin - reference[places, i].to(margin) for i, margin in enumerate(margins)]
        mine = [counts for _, counts in own]
        rows.append(gather_rows(_measure(margins, winners, losers, settings), mine, len(indices)))
        if not bool(rows[-1].isfinite().all()):
            nonfinite = "loss"
            break
        for engine, agents in groups:
            loss = _joint_loss(margins, agents, settings)
            engine.backward((loss * torch.tensor(mine).to(loss)).sum() / len(live))

    steps: list[StepResult] = []
    for engine, _ in groups:
        if nonfinite or not live:
            engine.zero_grad()
            steps.append(StepResult(math.nan if nonfinite else 0.0, 0.0, skipped=True))
        else:
            steps.append(engine.step())
            nonfinite = "gradient" if steps[-1].skipped else nonfinite

    names = ["loss", "margin", "winner_logps", "loser_logps"]
    names += [f"agent_{i}/margin" for i in range(len(models))]
    table = torch.cat(rows) if rows else torch.zeros(1, len(names))
    metrics: Metrics = dict(zip(names, table.mean(dim=0).tolist(), strict=True))
    for (_, agents), result in zip(groups, steps, strict=True):
        metrics |= {f"agent_{agent}/grad_norm": result.grad_norm for agent in agents}
    return metrics | {
        "accuracy": preference_accuracy(table[:, 1]).mean().item(),
        "grad_norm": math.sqrt(sum(result.grad_norm**2 for result in steps)),
        "learning_rate": steps[0].learning_rate,
        "pairs": len(batch),
        "masked_pairs": len(batch) - len(live),
        "skipped": int(any(result.skipped for result in steps)),
    }, nonfinite


def _joint_loss(margins: Sequence[Tensor], agents: Sequence[int], settings: MADPOUpdateSettings) -> Tensor:
    """Loss `[B]` of the joint margin, as a function of the margins of `agents` alone (they share one model).

    The others are detached: the gradient is the joint loss's gradient with respect to this model, and its
    backward neither walks through the others' graphs nor leaves their device.
    """
    own = margins[agents[0]].new_zeros(len(margins[agents[0]]))
    for agent, margin in enumerate(margins):
        own = own + (margin if agent in agents else margin.detach()).to(own.device)
    return preference_loss(own, settings.beta, settings.loss_type, settings.label_smoothing)


@torch.no_grad()
def _measure(
    margins: Sequence[Tensor],
    winners: Sequence[Tensor],
    losers: Sequence[Tensor],
    settings: MADPOUpdateSettings,
) -> Tensor:
    """Float64 `[B, 4 + N]` on the CPU, one row per pair."""
    per_agent, won, lost = (
        torch.stack([t.double().cpu() for t in column], dim=1) for column in (margins, winners, losers)
    )
    joint = per_agent.sum(dim=1)
    loss = preference_loss(joint, settings.beta, settings.loss_type, settings.label_smoothing)
    return torch.cat([torch.stack([loss, joint, won.sum(dim=1), lost.sum(dim=1)], dim=1), per_agent], dim=1)


def _check(
    models: Sequence[nn.Module],
    engines: Sequence[Engine],
    pad_ids: Sequence[int],
    pairs: Sequence[PairTokens],
    reference: Tensor | None,
) -> None:
    agents = len(models)
    if not len(engines) == len(pad_ids) == agents >= 1:
        counts = f"{agents} models, {len(engines)} engines and {len(pad_ids)} pad ids"
        raise ConfigError(f"{counts}; one of each is needed per agent")
    for index, pair in enumerate(pairs):
        if len(pair.prompts) != agents:
            raise DataError(f"pair {index} is of {len(pair.prompts)} agents; the team has {agents}")
    if reference is not None and reference.shape != (len(pairs), agents):
        shape = tuple(reference.shape)
        raise DataError(f"reference margins are {shape}; one per pair and agent is ({len(pairs)}, {agents})")


def _nonfinite_message(what: str, epoch: int, step: int, batch: Iterable[int], in_a_row: int) -> str:
    pairs = ", ".join(map(str, batch))
    text = f"the {what} of epoch {epoch}, minibatch {step} (pairs {pairs}) is not finite"
    if in_a_row >= NONFINITE_LIMIT:
        return f"{text}, nor were the {in_a_row - 1} before it: the policies diverge; lower the learning rate"
    return f"{text}; on_nonfinite: skip leaves such minibatches out and counts them"


def _chunks(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
