"""What a run asks of DVC: is a stage up to date, record it, restore it, make a repository.

DVC is imported inside the functions: it costs half a second and a plain run without a pipeline needs none of
it. Stages are addressed by the absolute path of their `dvc.yaml`, so the working directory does not matter.
Names are those of DVC: `prepare`, `iterate@0001`, `evaluate`.
"""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comlrl_core.errors import ComlrlError, ConfigError
from comlrl_core.files import atomic_write_bytes
from flows.pipeline_files import iteration_key, missing_dependencies, set_iterations, sync_dependencies
from flows.yaml_edit import parse, read

__all__ = [
    "PipelineError",
    "bring_back_outputs",
    "commit",
    "drop_from_cache",
    "dvc_root",
    "init",
    "inputs_digest",
    "is_current",
    "is_tracked",
    "iteration_key",
    "lock_backup",
    "missing_dependencies",
    "restore",
    "set_iterations",
    "status",
    "sync_dependencies",
]

logger = logging.getLogger(__name__)

_DVC_TEMPORARY = re.compile(r"\.[\w-]{22}\.tmp")
_one_at_a_time = threading.RLock()  # DVC's lock excludes other processes, not other threads of this one


class PipelineError(ComlrlError):
    """DVC could not do what was asked; the message holds its reason."""


def is_tracked(work_root: Path) -> bool:
    """True means: the project has a `dvc.yaml` and lies in a DVC repository."""
    return (Path(work_root) / "dvc.yaml").is_file() and dvc_root(work_root) is not None


def dvc_root(work_root: Path) -> Path | None:
    """The folder of the DVC repository that holds `work_root`, as DVC looks for it."""
    folder = Path(work_root).resolve()
    return next((path for path in (folder, *folder.parents) if (path / ".dvc").is_dir()), None)


def status(work_root: Path, stage: str) -> list[str]:
    """What `dvc status` says about `stage`, one line each; empty means up to date.

    Raises `PipelineError` if there is no such stage, or if another process is running it.
    """
    with _stage(work_root, stage, "read the status of") as loaded:
        return _lines(loaded.status())


def is_current(work_root: Path, stage: str) -> bool:
    """True means: the stage's command, settings, dependencies and outputs are those that `dvc.lock` records.

    Always False without a DVC pipeline.
    """
    return is_tracked(work_root) and not status(work_root, stage)


def inputs_digest(work_root: Path, stage: str) -> str:
    """SHA-256 over what `stage` would be run with now: its command, settings and dependencies' contents.

    Take it before the work and give it to `commit`, which then refuses to record results under changed
    inputs.
    """
    with _stage(work_root, stage, "read the inputs of") as loaded:
        return _inputs(loaded)


def commit(work_root: Path, stage: str, *, expected_inputs: str | None = None) -> bool:
    """Record the files on disk as the result of `stage` (`dvc commit`), also in the run cache.

    False, with nothing recorded, if the inputs are no longer those of `expected_inputs`, or without a
    pipeline. Raises `PipelineError` if an output or dependency is missing.
    """
    if not is_tracked(work_root):
        return False
    with _stage(work_root, stage, "commit") as loaded:
        if expected_inputs is not None and _inputs(loaded) != expected_inputs:
            logger.warning(
                "code, settings or data of %s changed while it ran: its results are not committed",
                stage,
            )
            return False
        loaded.save(allow_missing=False)
        loaded.commit(allow_missing=False, relink=True)
        _record(loaded)
    return True


def restore(work_root: Path, stage: str) -> bool:
    """Put the outputs of `stage` in place from DVC's cache instead of computing them; True means they are
    there now.

    Works when `dvc.lock` fits the present inputs and outputs are missing or damaged, and when the run cache
    knows a former run with these inputs. Outputs whose content is in no cache (edited by hand) are never
    overwritten.
    """
    if not is_tracked(work_root):
        return False
    with _stage(work_root, stage, "restore") as loaded:
        if not loaded.status():
            return True
        if any(out.use_cache and out.exists and not _in_cache(out) for out in loaded.outs):
            return False
        if any(not dep.exists for dep in loaded.deps):
            return False
        if not loaded.changed_stage() and not loaded.changed_deps():
            if any(out.use_cache and out.changed_cache() for out in loaded.outs):  # pruned, or never fetched
                return False
            loaded.checkout(force=True)  # never asks: everything that it replaces is in the cache
        elif not _restore_former_run(loaded):
            return False
        # Read anew: the object in memory already holds the present hashes and would call anything up to date.
        return not loaded.repo.stage.load_one(loaded.path, stage).status()


def bring_back_outputs(work_root: Path) -> dict[str, list[str]]:
    """Check out of DVC's cache each recorded output that is not on disk, whatever else its stage lacks.

    Returns stage -> outputs that are still missing, since the cache does not hold them, in the pipeline's order.
    """
    file = Path(work_root).resolve() / "dvc.yaml"
    from dvc.repo import Repo, lock_repo

    _quiet()
    with _one_at_a_time, Repo(str(file.parent), _wait_for_lock=True) as repo, lock_repo(repo):
        _recover(file.with_name("dvc.lock"))
        missing: dict[str, list[str]] = {}
        for stage in repo.index.stages:
            if stage.path_in_repo != os.path.relpath(file, repo.root_dir):
                continue
            for out in stage.outs:
                if not out.hash_info or out.exists:
                    continue
                if out.use_cache and not out.changed_cache():
                    out.checkout(force=True)
                else:
                    missing.setdefault(stage.addressing.rpartition(":")[2], []).append(out.def_path)
        return missing


def drop_from_cache(work_root: Path, stages: Sequence[str], selected: Callable[[Any], bool]) -> int:
    """Remove from DVC's cache what only the `selected` outputs of `stages` hold; returns the bytes freed."""
    file = Path(work_root).resolve() / "dvc.yaml"
    from dvc.repo import Repo, lock_repo

    with _one_at_a_time, Repo(str(file.parent), _wait_for_lock=True) as repo, lock_repo(repo):
        dropped: dict[str, str] = {}
        kept: set[str] = set()
        for stage in repo.index.stages:
            for out in stage.outs:
                if not out.use_cache or not out.hash_info:
                    continue
                objects = _objects(out)
                if stage.addressing.rpartition(":")[2] in stages and selected(out):
                    dropped |= objects
                else:
                    kept |= objects.keys()
        freed = 0
        for value, path in dropped.items():
            if value not in kept and os.path.exists(path):
                freed += os.path.getsize(path)
                os.chmod(path, 0o644)
                os.unlink(path)
        return freed


def _objects(out: Any) -> dict[str, str]:
    """Hash -> cache file of an output: itself, and for a folder every file in it."""
    value = out.hash_info.value
    objects = {value: out.cache.oid_to_path(value)}
    if out.hash_info.isdir and out.cache.exists(value):
        tree = out.get_obj()
        for _, _, entry in tree or ():
            objects[entry.value] = out.cache.oid_to_path(entry.value)
    return objects


def _restore_former_run(loaded: Any) -> bool:
    from dvc.stage.cache import RunCacheNotFoundError

    try:
        loaded.repo.stage_cache.restore(loaded)
    except RunCacheNotFoundError:
        return False
    loaded.save(allow_missing=False)
    loaded.commit(allow_missing=False, relink=True)
    _record(loaded)
    return True


def _record(loaded: Any) -> None:
    """Write the stage's entry into `dvc.lock`; where that fails (a full disk), the file is as it was.

    DVC writes it in place, and a torn one would lose the record of every stage.
    """
    lock = Path(loaded.path).with_name("dvc.lock")
    backup = lock_backup(lock)
    if lock.is_file():
        atomic_write_bytes(backup, lock.read_bytes())
    try:
        loaded.dvcfile.dump_stages([loaded], update_pipeline=False)
    except BaseException:
        if backup.is_file():
            backup.replace(lock)
        raise
    backup.unlink(missing_ok=True)


def lock_backup(lock: Path) -> Path:
    """Where `dvc.lock` lies while it is written; it stays there when the process is killed meanwhile."""
    return lock.with_name(f".{lock.name}.before")


def _sweep(loaded: Any) -> None:
    """Remove what DVC leaves beside or in outputs when copying one fails; in a folder it would count as content."""
    for path in (Path(out.fs_path) for out in loaded.outs):
        found = path.rglob("*") if path.is_dir() else path.parent.glob("*")
        for file in [file for file in found if _DVC_TEMPORARY.fullmatch(file.name)]:
            file.unlink(missing_ok=True)


def _recover(lock: Path) -> None:
    """Put back a `dvc.lock` that a killed process left half written."""
    backup = lock_backup(lock)
    if not backup.is_file():
        return
    try:
        parse(read(lock), lock)
        backup.unlink()
    except ConfigError:
        backup.replace(lock)


@contextmanager
def _stage(work_root: Path, name: str, action: str) -> Iterator[Any]:
    """The loaded stage, under DVC's repository lock."""
    file = Path(work_root).resolve() / "dvc.yaml"
    if not file.is_file():
        raise PipelineError(f"cannot {action} {name}: {file} does not exist")
    logging.getLogger("dvc").setLevel(logging.WARNING)  # or every commit announces itself
    from dvc.exceptions import DvcException
    from dvc.repo import Repo, lock_repo

    _quiet()
    with _one_at_a_time:
        try:
            with Repo(str(file.parent), _wait_for_lock=True) as repo, lock_repo(repo):
                _recover(file.with_name("dvc.lock"))
                repo.stage_cache = _run_cache(repo, file)
                loaded = repo.stage.load_one(str(file), name)
                try:
                    yield loaded
                except BaseException:
                    _sweep(loaded)
                    raise
        except DvcException as error:
            reason = str(error).strip() or type(error).__name__
            cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise PipelineError(f"cannot {action} {name} of {file}: {reason}{cause}") from error


def _quiet() -> None:
    """DVC reports to a person at the command line; its lines would stand among those of a run."""
    logging.getLogger("dvc").setLevel(logging.WARNING)


def _run_cache(repo: Any, dvc_yaml: Path) -> Any:
    """DVC's run cache, for any working directory: its own looks for `dvc.yaml` in the present one."""
    from dvc.stage import PipelineStage, create_stage
    from dvc.stage.cache import StageCache
    from dvc.stage.loader import StageLoader

    class RunCache(StageCache):  # type: ignore[misc, unused-ignore]
        def _create_stage(self, cache: dict[str, Any], wdir: str | None = None) -> Any:
            outs = [out["path"] for out in cache["outs"]]
            stage = create_stage(
                PipelineStage, repo=self.repo, path=str(dvc_yaml), cmd=cache["cmd"], wdir=wdir, outs=outs
            )
            StageLoader.fill_from_lock(stage, cache)
            return stage

    return RunCache(repo)


def _lines(status: Mapping[str, Sequence[Any]]) -> list[str]:
    lines = []
    for entry in (entry for entries in status.values() for entry in entries):
        if not isinstance(entry, Mapping):
            lines.append(str(entry))
            continue
        for (
            kind,
            changes,
        ) in entry.items():  # {"changed deps": {"data/x": "modified", "params.yaml": {"seed": "new"}}}
            lines += [f"{kind}: {name} ({_flat(change)})" for name, change in changes.items()]
    return lines


def _flat(change: Any) -> str:
    if isinstance(change, Mapping):
        return ", ".join(f"{name} {_flat(value)}" for name, value in change.items())
    return str(change)


def _inputs(loaded: Any) -> str:
    from dvc.stage.serialize import to_single_stage_lockfile

    loaded.save_deps(allow_missing=True)
    entry = to_single_stage_lockfile(loaded)
    content = {key: value for key, value in entry.items() if key != "outs"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _in_cache(out: Any) -> bool:
    """True means: every byte that lies where `out` belongs is also in DVC's cache."""
    _, _, found = out._build(
        out.cache,
        out.fs_path,
        out.fs,
        out.hash_name,
        ignore=out.dvcignore,
        dry_run=True,
        no_progress_bar=True,
    )
    files = [entry.value for _, _, entry in found] if found.hash_info.isdir else [found.hash_info.value]
    return all(out.cache.exists(value) for value in files)


def init(work_root: Path) -> str:
    """Make the project a DVC repository; safe to repeat. Returns how: "git", "subdir", "no-scm" or "present".

    "subdir" is a folder inside a git repository, "no-scm" one outside any (or one that git ignores). A
    project that was copied without its `.git` gets `core.no_scm` in the private `.dvc/config.local`, without
    which every command fails. Telemetry and update checks are switched off in the repository's settings, and
    `.comlrl` is kept out of DVC and git.
    """
    root = Path(work_root).resolve()
    git_root = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    existing = dvc_root(root)
    if existing is not None:
        kind = "present"
        if git_root is None:
            _without_git(existing)
    else:
        kind = "no-scm" if git_root is None else "git" if git_root == root else "subdir"
        kind = _create(root, kind)
    _ensure_lines(root / ".dvcignore", ["/.comlrl/", "__pycache__/"])
    if git_root is not None and kind != "no-scm":
        _ensure_lines(root / ".gitignore", ["/.comlrl/", "__pycache__/"])
    return kind


def _create(root: Path, kind: str) -> str:
    from dvc.exceptions import DvcException, InitError
    from dvc.repo import Repo

    _quiet()
    with _one_at_a_time:
        try:
            try:
                repo = Repo.init(str(root), no_scm=kind == "no-scm", subdir=kind == "subdir")
            except InitError as error:
                if kind == "no-scm" or (root / ".dvc").exists():
                    raise
                logger.warning("git cannot hold the pipeline of %s (%s): it is kept without git", root, error)
                kind = "no-scm"
                repo = Repo.init(str(root), no_scm=True)
            with repo, repo.config.edit("repo") as settings:
                settings["core"].update(analytics=False, check_update=False)
        except DvcException as error:
            raise PipelineError(f"cannot make {root} a DVC repository: {error}") from error
    return kind


def _without_git(root: Path) -> None:
    from configobj import ConfigObj

    if _no_scm(root / ".dvc" / "config") or _no_scm(root / ".dvc" / "config.local"):
        return
    local = ConfigObj(str(root / ".dvc" / "config.local"), encoding="utf-8")
    local.setdefault("core", {})["no_scm"] = True
    local.write()
    logger.warning("%s has no git repository any more: its pipeline goes on without git", root)


def _no_scm(file: Path) -> bool:
    from configobj import ConfigObj

    value = ConfigObj(str(file), encoding="utf-8").get("core", {}).get("no_scm", "false") if file.is_file() else "false"
    return str(value).lower() == "true"


def _ensure_lines(file: Path, lines: Sequence[str]) -> None:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    present = {line.strip() for line in text.splitlines()}
    missing = [line for line in lines if not present & {line, line.strip("/"), line.lstrip("/"), line.rstrip("/")}]
    if missing:
        head = text if not text or text.endswith("\n") else text + "\n"
        file.write_text(head + "\n".join(missing) + "\n", encoding="utf-8")
