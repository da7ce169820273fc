"""`comlrl prune`: remove the weights and optimizer states of old iterations, from disk and from DVC's cache."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comlrl_core.config.fields import ComparatorFields
from comlrl_core.config.files import read_params
from comlrl_core.config.run import RunConfig, iteration_key
from comlrl_core.errors import ConfigError
from comlrl_core.store import Store, latest
from flows import pipeline
from flows.project import Project
from tasks.job import Job
from tasks.pruned import keep_small_files

PRUNED_FOLDERS = ("models", "state")


def prune(project: Project, keep_last: int) -> tuple[list[int], int]:
    """Remove `models/` and `state/` of all iterations but the initial team and the newest `keep_last`.

    Iteration files stay: a later draw may need them. Returns the pruned iterations and the bytes that were freed.
    """
    config = read_params(project.params).run_config()
    needed = needed_iterations(config)
    if keep_last < needed:
        raise ConfigError(f"--keep-last must be at least {needed} with these settings, not {keep_last}")
    store = Store.below(project.work_root)
    newest = latest(store)
    kind = "train" if config.learns_from_rewards() else "iterate"
    with project.run_lock("prune"):
        published = [n for n in range(1, (newest or 0) + 1) if store.policy(n).is_dir()]
        pruned = [n for n in published if n <= (newest or 0) - keep_last]
        folders = [folder for n in pruned for folder in (store.policy(n), store.training_state(n))]
        freed = sum(_size(folder) for folder in folders)
        if pipeline.is_tracked(project.work_root):
            freed += pipeline.drop_from_cache(project.work_root, [f"{kind}@{iteration_key(n)}" for n in pruned], _heavy)
        for number in pruned:
            keep_small_files(project.work_root, number)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return pruned, freed


def needed_iterations(config: RunConfig) -> int:
    """How many of the newest iterations the next one needs: one, and as far back as a comparator looks."""
    training = config.training
    if isinstance(training, ComparatorFields) and training.comparator_policy == "history":
        return 1 + (training.comparator_history_k or 1)
    return 1


def is_pruned(job: Job, changed: list[str], iteration: int) -> bool:
    """Whether nothing but files of old iterations is missing (`changed`: DVC's lines), and a later iteration is there.

    An output that is in no cache either reads "not in cache", whether it is there or not.
    """
    newest = latest(job.store)
    if newest is None or not 0 < iteration <= newest:
        return False
    own = [name for line in changed if (name := missing_file(line, "outs"))]
    gone = all(not (job.work_root / name).exists() for name in own)
    rest = [line for line in changed if not missing_file(line, "outs")]
    return gone and (iteration < newest or not own) and all(missing_file(line, "deps") for line in rest)


def missing_file(line: str, kind: str) -> str:
    """The file that DVC calls missing in a line such as `changed outs: models/iteration_0001 (deleted)`; else "".

    Outputs (`kind` "outs") are missing, or in no cache; dependencies ("deps") can only be missing.
    """
    states = ("not in cache", "deleted") if kind == "outs" else ("deleted",)
    name, _, state = line.removeprefix(f"changed {kind}: ").rpartition(" (")
    return name if line.startswith(f"changed {kind}: ") and state.rstrip(")") in states else ""


def _heavy(out: Any) -> bool:
    """Whether an output of a stage is one that is pruned."""
    return Path(out.def_path).parts[0] in PRUNED_FOLDERS


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else iter(())
