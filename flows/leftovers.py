"""Files that an earlier run left and this one will read: damaged ones are refused before anything is written.

Every file of ours is written aside and renamed, so one that is torn or of another kind was changed by somebody else. It
is never repaired in silence: the message says which it is and that removing it makes it anew. What is missing is no
matter of this check, since a run makes or restores it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comlrl_core.critics.layout import FOLDER as CRITIC_FOLDER
from comlrl_core.critics.layout import check_critics
from comlrl_core.environments.tasks import read_tasks
from comlrl_core.errors import DataError
from comlrl_core.files import iter_jsonl, read_json
from comlrl_core.preference.candidates import read_candidates
from comlrl_core.preference.files import iteration_path, meta_path, read_iteration
from comlrl_core.preference.records import from_json
from comlrl_core.store import MANIFEST, IterationEntry, Manifest, Store, manifest_digest, read_progress
from comlrl_core.team.sources import check_model_folder, check_safetensors
from tasks.job import Job
from tasks.steps import Steps, file_digest, inputs_after, steps_of

# Larger step files are read by their stage alone, which refuses them as well: a check takes seconds.
LARGEST_READ = 64 * 2**20
AGAIN = "remove it, and it is made again"


def check_leftovers(job: Job, last: int) -> None:
    """Refuse damaged files of iterations up to `last` and of the unfinished one after them. `DataError` names the file.

    Iterations that settings or code have overtaken are not looked at: they are made anew.
    """
    for path in (job.train_tasks, job.eval_tasks):
        if path.exists():
            with _advice(AGAIN):
                read_tasks(path)
    if not job.train_tasks.is_file() or not _present(job.store, 0):
        return
    newest = 0
    _check_policy(job.store, 0)
    for iteration in range(1, last + 1):
        if not _present(job.store, iteration):
            continue
        if not _is_current(job, iteration):
            break
        _check_policy(job.store, iteration)
        newest = iteration
    history = _manifest(job.store, newest).history
    for entry in history:
        _check_pairs(job, newest, entry)
    if newest < job.config.num_iterations:
        _check_state(job.store.training_state(newest))
        _check_steps(job, newest + 1)
    for path in sorted(job.evaluations.glob("*.jsonl")):
        _lines(path, lambda *_: None)


def _present(store: Store, iteration: int) -> bool:
    return (store.policy(iteration) / MANIFEST).exists()


def _manifest(store: Store, iteration: int) -> Manifest:
    path = store.policy(iteration) / MANIFEST
    with _advice(f"remove {path.parent}, and the iteration is made again"):
        manifest = Manifest.read(path)
        if manifest.iteration != iteration:
            raise DataError(f"{path}: iteration {manifest.iteration} contradicts the folder's name")
    return manifest


def _is_current(job: Job, iteration: int) -> bool:
    """Whether `iteration` was made from these settings, this code and the iteration before it."""
    manifest = _manifest(job.store, iteration)
    if manifest.previous is None or manifest.inputs != inputs_after(job, iteration, manifest.previous):
        return False
    before = iteration - 1  # None of it is there after pruning: then the digest of its manifest stands for it.
    return not _present(job.store, before) or manifest_digest(job.store, before) == manifest.previous


def _check_policy(store: Store, iteration: int) -> None:
    _manifest(store, iteration)
    _check_team(store.policy(iteration))


def _check_team(folder: Path) -> None:
    with _advice(f"remove {folder}, and the iteration is made again"):
        team = read_json(folder / "team.json")
        count = team.get("num_agents") if isinstance(team, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise DataError(f"{folder / 'team.json'}: field 'num_agents': expected a number from 1, found {count!r}")
        for agent in range(count):
            check_model_folder(folder / f"agent_{agent}")
        check_critics(folder / CRITIC_FOLDER)


def _check_pairs(job: Job, newest: int, entry: IterationEntry) -> None:
    path = iteration_path(job.store.replay, entry.iteration)
    if path.exists():
        advice = f"restore it (a copy, or `dvc checkout {path.name}` in its folder), or {AGAIN}"
        with _advice(advice):
            if not path.is_file() or file_digest(path) != entry.digest:
                read_iteration(path)  # says what is wrong in it, if anything is
                raise DataError(f"{path}: changed since iteration {newest} was made from it")
    meta = meta_path(job.store.replay, entry.iteration)
    if meta.exists():
        with _advice(f"restore it, or remove {path.name} beside it too, and both are made again"):
            values = read_json(meta)
            if not isinstance(values, dict) or values.get("pairs_sha256") != entry.digest:
                raise DataError(f"{meta}: field 'pairs_sha256': describes other pairs than those of {path.name}")


def _check_state(folder: Path) -> None:
    if not folder.exists():
        return
    with _advice("restore it, or remove the iteration's folders in models and state, and it is made again"):
        read_progress(folder)
        for path in sorted(folder.glob("engine_*")):
            if path.is_dir():
                check_safetensors(path / "engine.safetensors")


def _check_steps(job: Job, iteration: int) -> None:
    """Finished steps of the iteration that an interrupted run was in."""
    steps: Steps = steps_of(job, iteration)
    if not steps.folder.is_dir():
        return
    for path in (*sorted(steps.folder.glob("candidates_*.jsonl")), *sorted(steps.folder.glob("scored_*.jsonl"))):
        if path.is_file() and path.stat().st_size > LARGEST_READ:
            continue
        with _advice(AGAIN):
            read_candidates(path)
    if steps.entry.exists():
        with _advice(AGAIN):
            IterationEntry.from_json(read_json(steps.entry), str(steps.entry))
    if steps.drawn.exists():
        _lines(steps.drawn, from_json)
    if (steps.policy / MANIFEST).exists():
        with _advice(f"remove {steps.policy}, and it is made again"):
            Manifest.read(steps.policy / MANIFEST)
        _check_team(steps.policy)
        _check_state(steps.state)


def _lines(path: Path, read: Callable[[dict[str, Any], str], Any]) -> None:
    if path.is_file() and path.stat().st_size > LARGEST_READ:
        return
    with _advice(AGAIN):
        for number, value in iter_jsonl(path):
            read(value, f"{path}: line {number}")


@contextmanager
def _advice(what: str) -> Iterator[None]:
    """A refusal of a file says what can be done about it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} ({what})") from error
