"""A Prefect API for one run: the server that already answers, or one of our own that lives as long as it is
used.

A server needs 6 to 34 s until it answers, so `start` only launches it and `wait` blocks later, after the slow
imports. Our own server has a small supervisor between it and us. Every process that uses the server holds a
shared file lock; the supervisor ends the server as soon as nobody does. The operating system drops a lock
with its process, so a run that is killed outright leaves no server behind either, and a server that two runs
share outlives the first. The supervisor itself takes the server with it (Linux: `PR_SET_PDEATHSIG`).

This file is also the supervisor's program: `python -P prefect_api.py STATE_ROOT URL COMMAND...`.
"""

import atexit
import ctypes
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
WAIT_SECONDS = 180.0
STOP_SECONDS = 20.0
"""How long a server may take to close its database before it is killed."""

_POLL_SECONDS = 0.2
_RECORD = "server.json"
_USERS = "server.users"
_START = "server.start.lock"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class PrefectAPI:
    """The Prefect API of one process; use `embedded`, or `start`, `wait` and `stop`."""

    def __init__(self, state_root: Path, *, command: Sequence[str] | None = None) -> None:
        """`command` replaces the server program (tests); `{port}` in it is filled in."""
        self.state_root = Path(state_root).expanduser().resolve()
        self.url: str | None = None
        self.owned = False
        """True means: this process launched the server (others may use it)."""
        self._command = command
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._users: int | None = None
        self._former_url: str | None = None
        self._ready = False

    @property
    def log_file(self) -> Path:
        return self.state_root / "logs" / "prefect-server.log"

    def start(self) -> "PrefectAPI":
        """Find a server or launch one; returns at once and sets `url` and `PREFECT_API_URL`."""
        self._former_url = os.environ.get("PREFECT_API_URL")
        if self._former_url:
            if healthy(self._former_url):
                self.url, self._ready = self._former_url, True
                return self
            logger.warning("nothing answers at PREFECT_API_URL=%s: an own server is used", self._former_url)
        self._find_or_launch()
        atexit.register(self.stop)
        return self

    def wait(self, timeout: float = WAIT_SECONDS) -> str:
        """Block until the API answers; its URL. Raises `RuntimeError` with the end of the server's log."""
        if self.url is None:
            raise RuntimeError("wait() needs start() before it")
        deadline = time.monotonic() + timeout
        launches = 0
        while not self._ready:
            if healthy(self.url):
                self._ready = True
            elif not self._alive():
                launches += 1
                if launches > 2 or time.monotonic() > deadline:  # 2: another process may have taken the port
                    message = self._failure("the Prefect server ended before it answered")
                    self.stop()
                    raise RuntimeError(message)
                self._forget()
                self._find_or_launch()
            elif time.monotonic() > deadline:
                message = self._failure(f"the Prefect server did not answer within {timeout:g} s")
                self.stop()
                raise RuntimeError(message)
            else:
                time.sleep(_POLL_SECONDS)
        _refresh_prefect_settings()
        return self.url

    def stop(self) -> None:
        """Stop using the server. The last user waits until it is gone. Safe to repeat."""
        atexit.unregister(self.stop)
        if self._users is None:
            return
        if self._ready:
            _send_what_is_queued()
        record = read_record(self.state_root) or {"persistent": True}
        self._forget()
        if self._former_url is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = self._former_url
        _refresh_prefect_settings()
        self.url, self._ready, self.owned = None, False, False
        deadline = time.monotonic() + STOP_SECONDS + 5.0
        while not record["persistent"] and time.monotonic() < deadline and not self._used_by_others():
            if self._supervisor is not None:
                self._supervisor.poll()  # or it stays a zombie
            if not _running(int(record["pid"])):
                break
            time.sleep(_POLL_SECONDS / 4)

    def _find_or_launch(self) -> None:
        self.state_root.mkdir(parents=True, exist_ok=True)
        with _locked(self.state_root / _START):
            # First the lock, then the look: a supervisor that is about to end cannot slip in between.
            while not self._use():
                time.sleep(_POLL_SECONDS / 4)  # the former server is just ending
            record = read_record(self.state_root)
            if record is not None:
                self.url, self.owned = str(record["url"]), False
            else:
                self.url, self.owned = self._launch(), True
        os.environ["PREFECT_API_URL"] = self.url

    def _use(self) -> bool:
        descriptor = os.open(self.state_root / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._users = descriptor
        return True

    def _forget(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _used_by_others(self) -> bool:
        """True means: somebody holds the shared lock (the supervisor only ever holds the exclusive one)."""
        descriptor = os.open(self.state_root / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _try_shared(descriptor)
        finally:
            os.close(descriptor)
        return False

    def _launch(self) -> str:
        port = free_port()
        url = f"http://{HOST}:{port}/api"
        command = self._command or [
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", HOST, "--port", "{port}", "--analytics-off"),
        ]
        command = [part.replace("{port}", str(port)) for part in command]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_file, "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self.state_root), url, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.state_root,  # Prefect reads pyproject.toml and .env of its working directory
                env=_server_environment(self.state_root, url, port),
                start_new_session=True,  # Ctrl-C is for the run; the server ends after it
            )
        write_record(self.state_root, url, self._supervisor.pid)
        return url

    def _alive(self) -> bool:
        if self._supervisor is not None and self.owned:
            return self._supervisor.poll() is None
        record = read_record(self.state_root)
        return record is not None and record["url"] == self.url

    def _failure(self, what: str) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-15:] if self.log_file.is_file() else []
        return f"{what}; {self.log_file} ends with:\n" + "\n".join(lines)


@contextmanager
def embedded(state_root: Path) -> Iterator[PrefectAPI]:
    """A started `PrefectAPI`; call `wait()` before the first flow. `state_root` is the `.comlrl` folder."""
    api = PrefectAPI(state_root).start()
    try:
        yield api
    finally:
        api.stop()


def healthy(url: str, timeout: float = 2.0) -> bool:
    """True means: a Prefect API answers at `url` (`http://host:port/api`). No proxy is asked on the
    loopback.
    """
    loopback = f"//{HOST}:" in url or "//localhost:" in url
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if loopback else []))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def free_port() -> int:
    """A TCP port of the loopback that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write_record(state_root: Path, url: str, pid: int, *, persistent: bool = False) -> None:
    """Tell later runs of this folder which server to use, and which process must live for it to be used.

    `persistent` means: the server stays when its users end (that of `comlrl up`).
    """
    record = {"url": url, "pid": pid, "created": psutil.Process(pid).create_time(), "persistent": persistent}
    path = Path(state_root) / _RECORD
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def read_record(state_root: Path) -> dict[str, Any] | None:
    """The recorded server (`url`, `pid`, `created`, `persistent`) if its process lives, else None."""
    try:
        record = json.loads((Path(state_root) / _RECORD).read_text(encoding="utf-8"))
        pid, created, url = int(record["pid"]), float(record["created"]), str(record["url"])
        process = psutil.Process(pid)
        fits = abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):
        return None
    record |= {"url": url, "pid": pid, "created": created, "persistent": bool(record.get("persistent"))}
    return record if fits else None


def _server_environment(state_root: Path, url: str, port: int) -> dict[str, str]:
    removed = (
        "PREFECT_API_AUTH_STRING",
        "PREFECT_API_KEY",
        "PREFECT_LOGGING_EXTRA_LOGGERS",
        "PREFECT_PROFILE",
    )
    return {key: value for key, value in os.environ.items() if key not in removed} | {
        "PREFECT_HOME": str(state_root / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),  # the UI calls the API at this port
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "true",
        "PYTHONUNBUFFERED": "1",
    }


def _refresh_prefect_settings() -> None:
    """Prefect reads its settings once; tell it that `PREFECT_API_URL` changed if it is already imported."""
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def _send_what_is_queued() -> None:
    """Logs and events go out from background threads, which would fail with tracebacks once the server is
    gone.
    """
    modules = {"prefect.logging.handlers": "APILogWorker", "prefect.events.worker": "EventsWorker"}
    for module, name in modules.items():
        if module in sys.modules:
            with suppress(Exception):
                getattr(sys.modules[module], name).drain_all(timeout=5.0, at_exit=False)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_shared(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


# The supervisor
# ---------------------------------------------------------------------------------------------------


class _Ended(Exception):
    """The supervisor was asked to stop."""


def supervise(state_root: Path, command: Sequence[str]) -> int:
    """Run the server until nobody holds the users' lock, it ends by itself, or this process is told to
    end.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    users = os.open(state_root / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    server: subprocess.Popen[bytes] | None = None
    try:
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
        while server.poll() is None:
            if _is_unused(users):
                break
            time.sleep(_POLL_SECONDS)
        return server.returncode or 0
    except _Ended:
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            end_group(server)
        record = read_record(state_root)
        if record is not None and record["pid"] == os.getpid():
            with suppress(OSError):
                (state_root / _RECORD).unlink()
        os.close(users)


def _is_unused(users: int) -> bool:
    """Take the lock exclusively if nobody shares it; it is then kept, so that no new user starts on a dying
    server.
    """
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def die_with_parent() -> None:
    """For `preexec_fn`: the child is killed when its parent ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own: ask, wait, then kill it with whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):  # also whatever it started
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), sys.argv[3:]))
