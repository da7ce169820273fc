"""Two agents get the same short sentence; the second should answer two to three times as long as the first.

Made for trying things out: it runs on a CPU with `builtin:tiny`, whose bundled grammar its sentences come
from. The reward is `builtin:length_ratio`. Over several turns, `transition` tells the agents how long their texts were.
"""

from collections.abc import Sequence
from typing import Any

from comlrl_core.environments.grammar import sentences
from comlrl_core.errors import ConfigError

SHORTEST, LONGEST = 20, 50
MOST_ASKED_PER_TASK = 64


def make_tasks(
    num_train: int = 32, num_eval: int = 16, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train rows, evaluation rows) with `task_id` and `prompt`; no sentence twice; same seed, same rows.

    Prompts are 20 to 50 characters long. Raises `ConfigError` for counts below zero or beyond what the
    grammar has.
    """
    if num_train < 0 or num_eval < 0:
        raise ConfigError(f"length_ratio: needs num_train >= 0 and num_eval >= 0, got {num_train} and {num_eval}")
    prompts = _short_sentences(num_train + num_eval, seed)
    # Evaluation tasks first: asking for more training tasks then leaves them as they are.
    held_out, train = prompts[:num_eval], prompts[num_eval:]
    return _rows("train", train), _rows("eval", held_out)


def transition(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[str]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
) -> list[str]:
    """Next turn: every agent is told the lengths (in characters) of all texts so far written, its own first.

    An `external_transition`: returns one prompt per agent, the task's prompt with `(you 12, other 30)` before it.
    """
    lengths = [len(text) for text in agent_completions]
    return [
        f"({', '.join([f'you {lengths[i]}', *(f'other {n}' for j, n in enumerate(lengths) if j != i)])}) {prompt}"
        for i in range(num_agents)
    ]


def _rows(split: str, prompts: list[str]) -> list[dict[str, Any]]:
    return [{"task_id": f"length-ratio-{split}-{i:04d}", "prompt": prompt} for i, prompt in enumerate(prompts)]


def _short_sentences(count: int, seed: int) -> list[str]:
    asked = count
    while count:
        short = [text for text in sentences(asked, seed) if SHORTEST <= len(text) <= LONGEST]
        if len(short) >= count:
            return short[:count]
        asked *= 2
        if asked > MOST_ASKED_PER_TASK * count:
            raise ConfigError(
                f"length_ratio: the grammar has no {count} sentences of {SHORTEST} to {LONGEST} characters"
            )
    return []
