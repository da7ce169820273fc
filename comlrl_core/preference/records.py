"""One preference pair: the published record, field for field, and what ours adds to it.

A reader of the published format can ignore the added fields. With the token ids of both sides, training uses
exactly what was sampled; a record without them must be tokenised by its reader (`has_token_ids` tells).
"""

from dataclasses import dataclass
from typing import Any

from comlrl_core.errors import DataError
from comlrl_core.preference import fields

REQUIRED = (
    "prompts",
    "winner_completions",
    "loser_completions",
    "winner_reward",
    "loser_reward",
    "candidate_reward_mean",
)
RAW = ("raw_rewards", "target_raw_reward", "comparator_raw_reward")
ADDED = (
    "task_id",
    "candidate_index",
    "winner_source",
    "oracle",
    "finished",
    "winner_token_ids",
    "loser_token_ids",
)
SIDES = ("winner", "loser")
CURRENT, COMPARATOR = "current", "comparator"

TokenIds = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class PairRecord:
    """A pair of joint responses to one task; every tuple of texts or ids has one entry per agent.

    `winner_reward` > `loser_reward`, both after the reward processor, like `candidate_reward_mean` (over all
    candidates of the task). `raw_rewards` (winner, loser), `target_raw_reward` (the team's) and
    `comparator_raw_reward` are before it; pairs of one side alone leave the three out.

    `candidate_index` is the index that both sides share, or (winner's, loser's) where both come from the
    team. `winner_source` is `current` (the team in training) or `comparator`. `*_finished` says which answers
    ended by themselves (None: all of them); `*_token_ids` are the sampled ids, None where there is only text.
    """

    prompts: tuple[str, ...]
    winner_completions: tuple[str, ...]
    loser_completions: tuple[str, ...]
    winner_reward: float
    loser_reward: float
    candidate_reward_mean: float
    raw_rewards: tuple[float, float] | None = None
    target_raw_reward: float | None = None
    comparator_raw_reward: float | None = None
    task_id: str | None = None
    candidate_index: int | tuple[int, int] | None = None
    winner_source: str | None = None
    oracle: str | None = None
    winner_finished: tuple[bool, ...] | None = None
    loser_finished: tuple[bool, ...] | None = None
    winner_token_ids: TokenIds | None = None
    loser_token_ids: TokenIds | None = None

    @property
    def num_agents(self) -> int:
        """How many agents answered."""
        return len(self.prompts)

    @property
    def has_token_ids(self) -> bool:
        """Whether every completion carries its token ids; if not, the reader must tokenise the text."""
        sides = (self.winner_token_ids, self.loser_token_ids)
        return all(side is not None and None not in side for side in sides)

    def token_ids(self, side: str, agent: int) -> tuple[int, ...] | None:
        """The sampled ids of one completion (`side`: winner or loser), or None if there is only its text."""
        ids = self.winner_token_ids if side == "winner" else self.loser_token_ids
        return None if ids is None else ids[agent]

    def finished(self, side: str, agent: int) -> bool:
        """Whether one completion ended by itself; true unless the record says otherwise."""
        flags = self.winner_finished if side == "winner" else self.loser_finished
        return True if flags is None else flags[agent]


def to_json(record: PairRecord, where: str = "pair record") -> dict[str, Any]:
    """The record as a JSON object, published fields first, absent ones left out; validated too."""
    result: dict[str, Any] = {key: _plain(getattr(record, key)) for key in REQUIRED}
    for key in (*RAW, *ADDED):
        value = _finished_to_json(record) if key == "finished" else _plain(getattr(record, key))
        if value is not None:
            result[key] = value
    from_json(result, where)
    return result


def from_json(value: Any, where: str) -> PairRecord:
    """A validated record. `where` (file and record) starts every `DataError`, which names the field too.

    Accepts the published format (no added fields). Refuses unknown fields, non-finite rewards, a winner that
    does not beat the loser, identical sides, lists that do not have one entry per agent.
    """
    fields.exact_keys(value, REQUIRED, (*RAW, *ADDED), where)
    prompts = fields.strings(value, "prompts", where)
    agents = len(prompts)
    finished = _finished_from_json(value, agents, where)
    record = PairRecord(
        prompts=prompts,
        winner_completions=fields.strings(value, "winner_completions", where, agents),
        loser_completions=fields.strings(value, "loser_completions", where, agents),
        winner_reward=fields.number(value, "winner_reward", where),
        loser_reward=fields.number(value, "loser_reward", where),
        candidate_reward_mean=fields.number(value, "candidate_reward_mean", where),
        raw_rewards=_raw_rewards(value, where),
        target_raw_reward=fields.number(value, RAW[1], where) if RAW[1] in value else None,
        comparator_raw_reward=fields.number(value, RAW[2], where) if RAW[2] in value else None,
        task_id=fields.string(value, "task_id", where) if "task_id" in value else None,
        candidate_index=_candidate_index(value, where),
        winner_source=fields.string(value, "winner_source", where) if "winner_source" in value else None,
        oracle=fields.string(value, "oracle", where) if "oracle" in value else None,
        winner_finished=finished[0],
        loser_finished=finished[1],
        winner_token_ids=_side_ids(value, "winner_token_ids", agents, where),
        loser_token_ids=_side_ids(value, "loser_token_ids", agents, where),
    )
    _check_together(record, where)
    return record


def _check_together(record: PairRecord, where: str) -> None:
    if not record.winner_reward > record.loser_reward:
        raise DataError(
            f"{where}: field 'winner_reward': the winner must score higher than the loser, found "
            f"{record.winner_reward} against {record.loser_reward}"
        )
    if record.winner_completions == record.loser_completions:
        raise DataError(f"{where}: field 'loser_completions': both sides have the same joint text")
    if record.winner_source not in (None, CURRENT, COMPARATOR):
        raise DataError(
            f"{where}: field 'winner_source': {record.winner_source!r} is unknown; allowed: {CURRENT}, {COMPARATOR}"
        )
    raw = (record.raw_rewards, record.target_raw_reward, record.comparator_raw_reward)
    if all(value is None for value in raw):
        return
    for key, part in zip(RAW, raw, strict=True):
        if part is None:
            raise DataError(f"{where}: field {key!r} is missing; {', '.join(RAW)} come together")
    won = (record.target_raw_reward, record.comparator_raw_reward)
    orders = {CURRENT: (won,), COMPARATOR: (won[::-1],), None: (won, won[::-1])}[record.winner_source]
    if record.raw_rewards not in orders:
        raise DataError(
            f"{where}: field 'raw_rewards': {list(record.raw_rewards or ())} are not the winner's and the "
            f"loser's of target_raw_reward {won[0]} and comparator_raw_reward {won[1]}"
        )


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _raw_rewards(value: dict[str, Any], where: str) -> tuple[float, float] | None:
    if "raw_rewards" not in value:
        return None
    found = value["raw_rewards"]
    if not isinstance(found, list) or len(found) != 2:
        raise DataError(f"{where}: field 'raw_rewards': expected [winner's, loser's], found {fields.shown(found)}")
    return fields.finite(found[0], "raw_rewards", where), fields.finite(found[1], "raw_rewards", where)


def _candidate_index(value: dict[str, Any], where: str) -> int | tuple[int, int] | None:
    if "candidate_index" not in value:
        return None
    found = value["candidate_index"]
    items = found if isinstance(found, list) else [found]
    good = all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items)
    if not good or (isinstance(found, list) and len(found) != 2):
        raise DataError(
            f"{where}: field 'candidate_index': expected an index or [winner's, loser's], found {fields.shown(found)}"
        )
    return (items[0], items[1]) if isinstance(found, list) else items[0]


def _side_ids(value: dict[str, Any], key: str, agents: int, where: str) -> TokenIds | None:
    if key not in value:
        return None
    found = value[key]
    if not isinstance(found, list):
        raise DataError(
            f"{where}: field {key!r}: expected one list of token ids per agent, found {fields.shown(found)}"
        )
    fields.per_agent(found, key, where, agents)
    return tuple(None if ids is None else fields.token_ids(ids, where, key) for ids in found)


def _finished_to_json(record: PairRecord) -> dict[str, list[bool]] | None:
    sides = {"winner": record.winner_finished, "loser": record.loser_finished}
    found = {side: list(flags) for side, flags in sides.items() if flags is not None}
    return found or None


def _finished_from_json(
    value: dict[str, Any], agents: int, where: str
) -> tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]:
    """One flag per agent for the winner and the loser; a single boolean stands for all of them."""
    if "finished" not in value:
        return None, None
    found = value["finished"]
    if isinstance(found, bool):
        return (found,) * agents, (found,) * agents
    fields.exact_keys(found, (), SIDES, f"{where}: field 'finished'")
    result: list[tuple[bool, ...] | None] = []
    for side in SIDES:
        flags = found.get(side)
        if flags is not None and not (
            isinstance(flags, list) and len(flags) == agents and all(isinstance(flag, bool) for flag in flags)
        ):
            raise DataError(
                f"{where}: field 'finished': expected {agents} of true or false for the {side} (one per "
                f"agent), found {fields.shown(flags)}"
            )
        result.append(None if flags is None else tuple(flags))
    return result[0], result[1]
