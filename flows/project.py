"""Where a project's files are, and the lock that keeps it to one writer.

Two roots: the *work root* holds settings, data, replay and models; the *state root* (`.comlrl`) holds what
runs share (Prefect's and MLflow's databases, logs). `dvc exp run --temp` works in a copy of the project and
names the original in `DVC_ROOT`: the copy has its own work root, lock and scratch folder and shares the
original's state root.
"""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from comlrl_core.errors import ComlrlError, ConfigError

PARAMS_NAME = "params.yaml"
STATE_NAME = ".comlrl"
LOCK_POLL_SECONDS = 0.1


class ProjectBusy(ComlrlError):
    """Another process is writing in this project."""


@dataclass(frozen=True)
class Project:
    """The folders of one project; both roots are absolute, and `state_root` is the `.comlrl` folder
    itself.
    """

    work_root: Path
    state_root: Path

    @classmethod
    def find(cls, start: Path | None = None, params: Path | None = None) -> "Project":
        """The project of the nearest folder with a `params.yaml`, from `start` (default: working directory)
        upward.

        `params` names the settings file instead; its folder is then the work root. Raises `ConfigError` if
        there is none.
        """
        if params is not None:
            file = Path(params).expanduser().resolve()
            if not file.is_file():
                raise ConfigError(f"settings file {file} does not exist")
            return cls.at(file.parent)
        origin = Path(start or Path.cwd()).expanduser().resolve()
        for folder in (origin, *origin.parents):
            if (folder / PARAMS_NAME).is_file():
                return cls.at(folder)
            if (folder / PARAMS_NAME).is_dir():
                raise ConfigError(f"{folder / PARAMS_NAME} is a folder; a file of settings is expected there")
        raise ConfigError(f"no {PARAMS_NAME} in {origin} or above it; `comlrl init` makes a project here")

    @classmethod
    def at(cls, work_root: Path) -> "Project":
        """The project in `work_root`; its state hangs on `COMLRL_HOME`, else `DVC_ROOT`, else the work
        root.
        """
        work = Path(work_root).expanduser().resolve()
        home = os.environ.get("COMLRL_HOME") or os.environ.get("DVC_ROOT") or work
        return cls(work, Path(home).expanduser().resolve() / STATE_NAME)

    @property
    def params(self) -> Path:
        return self.work_root / PARAMS_NAME

    @property
    def dvc_yaml(self) -> Path:
        return self.work_root / "dvc.yaml"

    @property
    def train_tasks(self) -> Path:
        return self.work_root / "data" / "tasks" / "train.jsonl"

    @property
    def eval_tasks(self) -> Path:
        return self.work_root / "data" / "tasks" / "eval.jsonl"

    @property
    def replay(self) -> Path:
        return self.work_root / "replay"

    @property
    def models(self) -> Path:
        return self.work_root / "models"

    @property
    def state(self) -> Path:
        return self.work_root / "state"

    @property
    def metrics(self) -> Path:
        return self.work_root / "metrics.json"

    @property
    def plots(self) -> Path:
        return self.work_root / "plots"

    @property
    def report(self) -> Path:
        return self.work_root / "report.html"

    @property
    def scratch(self) -> Path:
        """Finished steps of interrupted iterations. Below the work root: an experiment's copy has its own."""
        return self.work_root / STATE_NAME / "work"

    @property
    def lock_file(self) -> Path:
        """Below the work root, whatever `COMLRL_HOME` says: two shells with different homes must still
        exclude each other.
        """
        return self.work_root / STATE_NAME / "run.lock"

    @property
    def prefect_home(self) -> Path:
        return self.state_root / "prefect"

    @property
    def mlflow_db(self) -> Path:
        return self.state_root / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        return self.state_root / "artifacts"

    @property
    def logs(self) -> Path:
        return self.state_root / "logs"

    @contextmanager
    def run_lock(self, mode: str, *, children: bool = False, patience: float = 0.0) -> Iterator[None]:
        """Hold the project for writing; `mode` says for what ("run", "repro", "stage iterate" ...).

        Waits at most `patience` seconds for it, then raises `ProjectBusy` naming the holder (pid, mode, since when),
        having touched nothing. The lock is the operating system's and ends with its process, however that ends. With
        `children=True` processes that the holder starts may take the lock too while it is held (the stages of
        `comlrl repro`).
        """
        descriptor = _acquire_patiently(self.lock_file, mode, children, patience)
        try:
            if descriptor is not None:
                _write_holder(self.lock_file.with_suffix(".json"), mode, children)
            yield
        finally:
            if descriptor is not None:
                _release(self.lock_file, descriptor)

    def refuse_if_busy(self) -> None:
        """Raise `ProjectBusy` where another process is writing here; takes no lock and changes nothing.

        For a command that is slow to start; `run_lock` decides.
        """
        holder = _read_holder(self.lock_file.with_suffix(".json"))
        if _lives(holder) and not (holder.get("children") and _is_ancestor(holder)):
            raise ProjectBusy(_busy_message(self.lock_file, holder))


_held: set[Path] = set()
_held_guard = threading.Lock()


def _acquire_patiently(path: Path, mode: str, children: bool, patience: float) -> int | None:
    deadline = time.monotonic() + patience
    while True:
        try:
            return _acquire(path, mode, children)
        except ProjectBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(LOCK_POLL_SECONDS)


def _acquire(path: Path, mode: str, children: bool) -> int | None:
    """The locked file descriptor, or None where an ancestor holds the lock for its children."""
    holder_file = path.with_suffix(".json")
    with _held_guard:
        if path in _held:
            raise ProjectBusy(_busy_message(path, _read_holder(holder_file)))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ComlrlError(f"cannot lock {path}: {error}") from error
            holder = _read_holder(holder_file)
            if holder.get("children") and _is_ancestor(holder):
                return None
            raise ProjectBusy(_busy_message(path, holder)) from error
        _held.add(path)
    return descriptor


def _write_holder(path: Path, mode: str, children: bool) -> None:
    process = psutil.Process()
    holder = {
        "pid": process.pid,
        "created": process.create_time(),
        "mode": mode,
        "start": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        "children": children,
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(holder), encoding="utf-8")
    temporary.replace(path)


def _release(path: Path, descriptor: int) -> None:
    with _held_guard:
        _held.discard(path)
        with suppress(OSError):
            path.with_suffix(".json").unlink()
        os.close(descriptor)


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the process that left its name is still there (a killed one leaves its name behind)."""
    try:
        process = psutil.Process(int(holder["pid"]))
        same = abs(process.create_time() - float(holder["created"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, ValueError, TypeError, psutil.Error):
        return False


def _is_ancestor(holder: dict[str, Any]) -> bool:
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.pid == holder.get("pid") and abs(parent.create_time() - float(holder.get("created", 0))) < 1.0:
                return True
    return False


def _busy_message(path: Path, holder: dict[str, Any]) -> str:
    project = path.parent.parent
    if not holder:  # the holder has the lock and has not written its name yet
        return f"{project} is in use by another comlrl process; wait for it to end"
    return (
        f"{project} is in use by process {holder.get('pid')} (comlrl {holder.get('mode')}, "
        f"since {holder.get('start')}); wait for it to end, or stop it"
    )
