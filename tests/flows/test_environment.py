import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.environment import env_defaults, environment


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [
        *environment(tmp_path),
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "no_proxy",
    ]:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


def test_every_telemetry_switch_is_off_even_if_the_user_set_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")  # MLflow would go on sending: it knows "true" alone
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    env_defaults(tmp_path)
    assert os.environ["DO_NOT_TRACK"] == "true"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["DVC_NO_ANALYTICS"] == "1"


def test_settings_of_the_user_stay(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    env_defaults(tmp_path)
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://tracking:5000"
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect")


def test_a_second_project_of_the_process_gets_its_own_databases(tmp_path: Path) -> None:
    env_defaults(tmp_path / "a")
    env_defaults(tmp_path / "b")
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path / 'b' / 'mlflow.db'}"
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "b" / "prefect")


def test_the_loopback_is_not_asked_through_a_proxy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "intern")
    env_defaults(tmp_path)
    assert os.environ["no_proxy"] == "intern"  # no proxy, nothing to do
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    env_defaults(tmp_path)
    env_defaults(tmp_path)
    assert os.environ["no_proxy"] == "intern,127.0.0.1,localhost"


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """Setting the environment after these packages are imported would be too late."""
    code = (
        "import sys; from pathlib import Path; from flows.environment import env_defaults;"
        "import flows.pipeline, flows.project, flows.prefect_api, tasks.tracking;"
        "env_defaults(Path(sys.argv[1]));"
        "print(sorted({'prefect', 'mlflow', 'dvc', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
