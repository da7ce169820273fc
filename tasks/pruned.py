"""What stays of a pruned iteration: its manifest and its learning curves, so that a longer run still shows all of it.

They lie in `.comlrl/pruned/`, not in the iteration's folders: for DVC those are simply not there.
"""

import shutil
from pathlib import Path

from comlrl_core.errors import DataError
from comlrl_core.store import MANIFEST, Manifest, Store
from tasks.job import Job


class Pruned(DataError):
    """The weights of an iteration were removed, and what is asked for was not kept."""


def pruned_folder(work_root: Path, iteration: int) -> Path:
    """Where the small files of a pruned iteration lie."""
    return work_root / ".comlrl" / "pruned" / f"iteration_{iteration:04d}"


def keep_small_files(work_root: Path, iteration: int) -> None:
    """Copy what stays of an iteration that is about to be pruned."""
    store, target = Store.below(work_root), pruned_folder(work_root, iteration)
    target.mkdir(parents=True, exist_ok=True)
    measures = [path for path in store.training_state(iteration).glob("*") if path.suffix in (".json", ".jsonl")]
    for path in (store.policy(iteration) / MANIFEST, *measures):
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def manifest_of(job: Job, iteration: int) -> Manifest:
    """The manifest of an iteration, pruned or not; raises `Pruned` where none was kept."""
    kept = pruned_folder(job.work_root, iteration) / MANIFEST
    if job.store.has(iteration) or not kept.is_file():
        if not job.store.policy(iteration).is_dir():
            raise Pruned(f"iteration {iteration} was pruned, and nothing of it is kept in {kept.parent}")
        return job.store.manifest(iteration)
    return Manifest.read(kept)


def curve_path(job: Job, iteration: int, name: str) -> Path:
    """A file of metrics in the training state of an iteration, pruned or not; it need not be there."""
    path = job.store.training_state(iteration) / name
    kept = pruned_folder(job.work_root, iteration) / name
    return kept if kept.is_file() and not path.is_file() else path
