"""Training and held-out tasks by name: the built-in sets, files and data sets."""

from pathlib import Path
from typing import Any

from comlrl_core.environments.tasks import BUILTIN_PREFIX, load_tasks, make_builtin_tasks
from comlrl_core.errors import DataError

Rows = list[dict[str, Any]]


def task_sets(
    train: str,
    held_out: str | None,
    num_train: int | None,
    num_eval: int | None,
    seed: int,
    root: Path,
) -> tuple[Rows, Rows]:
    """(training rows, held-out rows) of the sources named in the settings.

    A built-in set never shares a task between the two; for other sources a shared `task_id` is an error, since it would
    make the evaluation measure what was trained on. Relative files are looked for under `root`.
    """
    training = _rows("train", train, num_train, num_eval, seed, root)
    evaluation = [] if held_out is None else _rows("eval", held_out, num_train, num_eval, seed, root)
    shared = {row["task_id"] for row in training} & {row["task_id"] for row in evaluation}
    if shared:
        raise DataError(
            f"tasks.eval {held_out!r} and tasks.train {train!r} share {len(shared)} tasks ({min(shared)} ...); "
            "held-out tasks must be others than those trained on"
        )
    return training, evaluation


def _rows(part: str, source: str, num_train: int | None, num_eval: int | None, seed: int, root: Path) -> Rows:
    if source.startswith(BUILTIN_PREFIX):
        return make_builtin_tasks(source, num_train, num_eval, seed)[0 if part == "train" else 1]
    limit = num_train if part == "train" else num_eval
    return load_tasks(below(root, source), limit)


def below(root: Path, source: str) -> str:
    """A relative file as seen from `root`, with its slice kept; a data set's name as it is."""
    name = source.partition("[")[0]
    return str(root / source) if (root / name).exists() else source
