"""From preference records to updated policies: what every MADPO door does in one iteration's update."""

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from comlrl_core.algorithms import madpo
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.shared import (
    UPDATES,
    Learned,
    load_training_state,
    make_engines,
    sampling,
    save_training_state,
)
from comlrl_core.engine.protocol import Engine
from comlrl_core.errors import DataError
from comlrl_core.preference.records import PairRecord
from comlrl_core.randomness import generator
from comlrl_core.team.team import Team

__all__ = [
    "UPDATES",
    "Learned",
    "learn",
    "load_training_state",
    "make_engines",
    "pair_tokens",
    "sampling",
    "save_training_state",
]

logger = logging.getLogger(__name__)


def learn(
    team: Team,
    engines: Sequence[Engine],
    records: Sequence[PairRecord],
    config: MADPOConfig,
    *,
    iteration: int,
    environment_steps: int = 0,
    load_initial: Callable[[], Team] | None = None,
    on_step: Callable[[madpo.Metrics, int], None] | None = None,
    start_epoch: int = 0,
) -> Learned:
    """Train the team on `records` for `config.num_train_epochs` passes.

    Args:
        engines: from `make_engines`, or restored by `load_training_state`; one per agent.
        iteration: names the random stream that orders the pairs.
        environment_steps: environment steps trained before this call.
        load_initial: loads the run's first team; needed with `reference: initial` alone, and released after scoring.
        on_step: called after each optimizer step with its metrics and the environment steps so far.
        start_epoch: the first pass to make (a resumed offline run).
    """
    pairs = [pair_tokens(record, team, config.max_new_tokens) for record in records]
    settings = madpo.MADPOUpdateSettings(
        beta=config.dpo_beta,
        loss_type=config.loss_type,
        label_smoothing=config.label_smoothing,
        train_batch_size=config.pairs_per_update(),
        micro_batch_size=config.micro_batch_size,
        num_train_epochs=config.num_train_epochs,
        on_nonfinite=config.on_nonfinite_loss,
    )
    steps = environment_steps + start_epoch * len(pairs) * config.environment_steps_per_pair

    def count(metrics: madpo.Metrics) -> None:
        nonlocal steps
        steps += int(metrics["pairs"]) * config.environment_steps_per_pair
        metrics["environment_steps"] = steps
        metrics["iteration"] = iteration
        if on_step is not None:
            on_step(metrics, steps)

    history = madpo.update(
        team.models,
        engines,
        team.pad_ids,
        pairs,
        settings,
        reference=_reference(team, pairs, settings, config, load_initial, start_epoch),
        order=lambda epoch: (
            generator(config.seed, iteration, "update", "order", epoch).permutation(len(pairs)).tolist()
        ),
        on_step=count,
        start_epoch=start_epoch,
    )
    warning = madpo.falling_logps_warning(history)
    if warning:
        logger.warning("iteration %d: %s", iteration, warning)
    if not pairs:
        logger.warning("iteration %d: there are no pairs to learn from; the policies stay as they are", iteration)
    return Learned(history, steps)


def pair_tokens(record: PairRecord, team: Team, max_new_tokens: int) -> madpo.PairTokens:
    """The token ids of a record: those that were sampled, or, where a record has text alone, the text's.

    A completion that comes as text gets one end-of-sequence token unless the record says that it was cut off.
    """
    if len(record.prompts) != team.num_agents:
        raise DataError(f"pair of task {record.task_id}: {len(record.prompts)} prompts for {team.num_agents} agents")
    prompts = [
        tuple(team.encode(prompt, agent, max_new_tokens, record.task_id or ""))
        for agent, prompt in enumerate(record.prompts)
    ]
    return madpo.PairTokens(
        prompts=tuple(prompts),
        winners=_side(record, "winner", team),
        losers=_side(record, "loser", team),
    )


def _side(record: PairRecord, side: str, team: Team) -> tuple[madpo.Ids, ...]:
    texts = record.winner_completions if side == "winner" else record.loser_completions
    sides = []
    for agent in team.agents:
        ids = record.token_ids(side, agent.index)
        if ids is None:
            ids = tuple(agent.encode_completion(texts[agent.index], record.finished(side, agent.index)))
        sides.append(ids)
    return tuple(sides)


def _reference(
    team: Team,
    pairs: Sequence[madpo.PairTokens],
    settings: madpo.MADPOUpdateSettings,
    config: MADPOConfig,
    load_initial: Callable[[], Team] | None,
    start_epoch: int,
) -> Tensor | None:
    """Margins of the reference policies, `[P, N]`, or None without a reference."""
    if config.reference == "none" or not pairs:
        return None
    if config.reference == "previous" and start_epoch == 0:
        models = team.models  # not updated yet: the team that entered this iteration
    else:
        if load_initial is None:
            raise DataError("reference: initial needs the run's initial policies, and they were not kept")
        models = load_initial().models
    batch_size = settings.micro_batch_size or settings.train_batch_size
    return madpo.reference_margins(models, pairs, team.pad_ids, batch_size, settings.normalised)
