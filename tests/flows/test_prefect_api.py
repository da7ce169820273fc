"""The life of the embedded server. Where Prefect is not the point, a stand-in answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.prefect_api import PrefectAPI, embedded, healthy, read_record, write_record

ROOT = Path(__file__).parents[2]
STAND_IN = """
import http.server, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "forks" in sys.argv: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
RUN = """
import sys, time
from pathlib import Path
from flows.prefect_api import PrefectAPI
api = PrefectAPI(Path(sys.argv[1]), command=sys.argv[3:] or None).start()
print(api.wait(), api.owned, flush=True)
if sys.argv[2] == "raise": raise ValueError("a failing run")
if sys.argv[2] == "wait": time.sleep(600)
"""


def stand_in(*words: str) -> list[str]:
    return [sys.executable, "-c", STAND_IN, "{port}", *words]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    yield tmp_path / ".comlrl"
    for process in started:
        process.kill()
        process.wait()
    started.clear()


started: "list[subprocess.Popen[str]]" = []


def run(state: Path, how: str, *words: str, prefect: bool = False) -> "subprocess.Popen[str]":
    """A process that uses the API and then ends, raises or waits."""
    command = [] if prefect else stand_in(*words)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(state), how, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    started.append(process)
    return process


def said(process: "subprocess.Popen[str]") -> tuple[str, bool]:
    assert process.stdout is not None
    url, owned = process.stdout.readline().split()
    return url, owned == "True"


def family(state: Path) -> list[psutil.Process]:
    """Supervisor, server and what they started: all that have this folder in their environment."""
    mark = f"PREFECT_HOME={state / 'prefect'}"
    found = []
    for process in psutil.process_iter():
        try:
            names = [f"{key}={value}" for key, value in process.environ().items()]
        except psutil.Error:
            continue
        if mark in names and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def gone(state: Path, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not family(state):
            return True
        time.sleep(0.1)
    return False


def test_start_returns_at_once_and_wait_gives_a_loopback_url(state: Path) -> None:
    api = PrefectAPI(state, command=stand_in())
    begin = time.monotonic()
    api.start()
    assert time.monotonic() - begin < 1.0
    url = api.wait()
    assert url.startswith("http://127.0.0.1:")
    assert os.environ["PREFECT_API_URL"] == url
    assert api.owned
    assert len(family(state)) == 2
    api.stop()
    assert family(state) == []
    assert "PREFECT_API_URL" not in os.environ
    assert read_record(state) is None
    api.stop()


@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_server_is_gone_when_the_run_ends(state: Path, how: str) -> None:
    process = run(state, how)
    _, errors = process.communicate()
    assert ("a failing run" in errors) == (how == "raise")
    assert family(state) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("word", ["plain", "forks"])
def test_a_killed_run_leaves_no_server_behind(state: Path, number: signal.Signals, word: str) -> None:
    process = run(state, "wait", word)
    said(process)
    assert len(family(state)) == (3 if word == "forks" else 2)
    process.send_signal(number)
    process.wait()
    assert gone(state)
    assert not (state / "server.json").exists()


def test_a_killed_supervisor_takes_the_server_with_it(state: Path) -> None:
    process = run(state, "wait")
    said(process)
    record = read_record(state)
    assert record is not None
    os.kill(record["pid"], signal.SIGKILL)
    assert gone(state, 5.0)
    process.kill()
    process.wait()


def test_runs_of_one_folder_share_a_server_until_the_last_one_ends(state: Path) -> None:
    first = run(state, "wait")
    url, owned = said(first)
    assert owned
    second = run(state, "wait")
    assert said(second) == (url, False)
    first.kill()
    first.wait()
    time.sleep(1.0)
    assert healthy(url)
    with embedded(state) as api:
        assert api.wait() == url
        assert not api.owned
    assert healthy(url)
    second.terminate()
    second.wait()
    assert gone(state)


def test_two_runs_that_start_together_use_one_server(state: Path) -> None:
    processes = [run(state, "wait") for _ in range(3)]
    answers = [said(process) for process in processes]
    assert len({url for url, _ in answers}) == 1
    assert sum(owned for _, owned in answers) == 1
    for process in processes:
        process.kill()
        process.wait()
    assert gone(state)


@pytest.mark.parametrize("content", ["", "[]", '{"url": "http://127.0.0.1:9/api"}', "stale"])
def test_a_stale_record_is_ignored(state: Path, content: str) -> None:
    """The process is gone, or its number belongs to another process now (another time of creation)."""
    state.mkdir()
    if content == "stale":
        content = json.dumps({"url": "http://127.0.0.1:9/api", "pid": os.getpid(), "created": 1.0})
    (state / "server.json").write_text(content)
    with PrefectAPIContext(state) as api:
        assert api.owned
        assert ":9/" not in api.wait()


class PrefectAPIContext:
    def __init__(self, state: Path) -> None:
        self.api = PrefectAPI(state, command=stand_in())

    def __enter__(self) -> PrefectAPI:
        return self.api.start()

    def __exit__(self, *error: object) -> None:
        self.api.stop()


def test_a_server_at_prefect_api_url_is_used_and_left_alone(state: Path, tmp_path: Path, monkeypatch) -> None:
    with PrefectAPIContext(tmp_path / "other") as other:
        url = other.wait()
        with embedded(state) as api:
            assert api.wait() == url
            assert not api.owned
        assert healthy(url)
        assert family(state) == []


def test_a_dead_prefect_api_url_means_an_own_server(state: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with PrefectAPIContext(state) as api:
        assert api.wait() != "http://127.0.0.1:9/api"
    assert "nothing answers at PREFECT_API_URL" in caplog.text
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"


def test_a_persistent_server_is_not_waited_for(state: Path) -> None:
    """That of `comlrl up` stays; a run must neither end it nor wait for its end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state.mkdir()
    server = subprocess.Popen([part.replace("{port}", str(port)) for part in stand_in()])
    write_record(state, f"http://127.0.0.1:{port}/api", server.pid, persistent=True)
    api = PrefectAPI(state).start()
    assert api.wait(20.0).endswith(f":{port}/api")
    begin = time.monotonic()
    api.stop()
    assert time.monotonic() - begin < 1.0
    assert server.poll() is None
    server.kill()
    server.wait()


def test_a_server_that_fails_is_reported_with_its_log(state: Path) -> None:
    api = PrefectAPI(state, command=[sys.executable, "-c", "raise SystemExit('no database')"]).start()
    with pytest.raises(RuntimeError, match=r"ended before it answered(.|\n)*no database"):
        api.wait()
    assert gone(state)


def test_a_server_that_never_answers_is_ended(state: Path) -> None:
    api = PrefectAPI(state, command=[sys.executable, "-c", "import time; time.sleep(600)"]).start()
    with pytest.raises(RuntimeError, match="did not answer within 1 s"):
        api.wait(1.0)
    assert gone(state)


@pytest.mark.slow
def test_a_server_that_ignores_the_request_to_end_is_killed(state: Path, monkeypatch) -> None:
    process = run(state, "wait", "stubborn")
    said(process)
    process.kill()
    process.wait()
    assert gone(state, 30.0)


@pytest.mark.slow
def test_a_real_prefect_server_lives_and_dies_with_its_users(state: Path) -> None:
    """uvicorn with one worker starts no further process, so nothing may be left after SIGKILL of the run."""
    process = run(state, "wait", prefect=True)
    url, owned = said(process)
    assert owned
    assert healthy(url)
    server = [item for item in family(state) if item.cmdline()[1:3] == ["-m", "prefect"]]
    assert len(server) == 1
    assert server[0].children(recursive=True) == []
    listening = [item.laddr for item in server[0].net_connections() if item.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    flow = (
        "import sys; from pathlib import Path; from flows.environment import env_defaults;"
        "from flows.prefect_api import embedded; state = Path(sys.argv[1]); env_defaults(state)\n"
        "with embedded(state) as api:\n"
        "    from prefect import flow\n"
        "    api.wait()\n"
        "    @flow\n"
        "    def answer(): return 42\n"
        "    print(api.url, answer())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", flow, state], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [url, "42"], done.stderr
    assert "Traceback" not in done.stderr
    process.kill()
    process.wait()
    assert gone(state, 30.0)
