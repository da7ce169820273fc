"""24 writing tasks (summaries, expansions, stories) for two writers, the second to write at greater length.

The prompts are bundled as `data/writing_prompts.jsonl`; the reward that fits is `builtin:length_ratio`.
"""

from importlib import resources
from typing import Any

from comlrl_core.environments.tasks import read_tasks
from comlrl_core.errors import ConfigError
from comlrl_core.randomness import generator


def writing_prompts() -> list[dict[str, Any]]:
    """All bundled rows (`task_id`, `kind`, `prompt`), in file order."""
    bundled = resources.files("comlrl_core.environments") / "data" / "writing_prompts.jsonl"
    with resources.as_file(bundled) as path:
        return read_tasks(path)


def make_tasks(
    num_train: int = 16, num_eval: int = 8, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train rows, evaluation rows), drawn without repetition. The same seed gives the same rows.

    Raises `ConfigError` if more tasks are asked for than there are.
    """
    rows = writing_prompts()
    if num_train < 0 or num_eval < 0 or num_train + num_eval > len(rows):
        raise ConfigError(
            f"writing_prompts: has {len(rows)} tasks; num_train and num_eval must be 0 or more and no more "
            f"together, got {num_train} and {num_eval}"
        )
    shuffled = [rows[position] for position in generator(seed, "writing_prompts").permutation(len(rows))]
    # Evaluation tasks first: asking for more training tasks then leaves them as they are.
    return shuffled[num_eval : num_eval + num_train], shuffled[:num_eval]
