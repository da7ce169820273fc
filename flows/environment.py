"""Environment variables that Prefect, MLflow and DVC read once, at import: set them first.

Nothing here imports those packages. Variables that the user already set stay, except the telemetry switches.
"""

import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

SERVER_START_SECONDS = 180.0
"""How long a Prefect server may take to answer; a cold one needs 16 to 34 s on two cores, and Prefect's own
limit is 20 s.
"""

_TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",  # "1" would do for Prefect, but MLflow understands "true" alone
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_LOOPBACK = ("127.0.0.1", "localhost")


PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # of `comlrl serve`
MLFLOW_UI = "COMLRL_MLFLOW_UI"  # where `comlrl serve` shows MLflow's pages

_made: dict[str, str] = {}
"""What `env_defaults` set in this process: a second project must not inherit the first one's databases."""


def environment(state_root: Path) -> dict[str, str]:
    """The variables with their values for the state folder `state_root` (`.../.comlrl`); changes nothing."""
    state = Path(state_root).expanduser().resolve()
    return _TELEMETRY_OFF | {
        "PREFECT_HOME": str(state / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(SERVER_START_SECONDS)),
        # DVC decides what is up to date; Prefect would hash whole models and serve results whose files are
        # gone.
        "PREFECT_TASKS_DEFAULT_NO_CACHE": "true",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "comlrl_core",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # the same lines come from plain runs
        "MLFLOW_TRACKING_URI": f"sqlite:///{state / 'mlflow.db'}",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 2 processes and 0.5 GB instead of 12 and 2 GB
        # Tracking is best effort: a tracking server that is down may cost seconds, not the defaults' minutes.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }


def env_defaults(state_root: Path) -> None:
    """Set the environment of this process and its children; call it before importing prefect, mlflow or dvc.

    Idempotent. `state_root` is the `.comlrl` folder (it need not exist yet). Says so once when Prefect is
    already imported with other settings, because it would keep those.
    """
    changed = []
    for name, value in environment(state_root).items():
        present = os.environ.get(name)
        if present is not None and present != _made.get(name) and name not in _TELEMETRY_OFF:
            continue  # the user's own
        if present != value:
            os.environ[name] = value
            changed.append(name)
        _made[name] = value
    _keep_loopback_off_the_proxy()
    # The setting above only adds Prefect's handler; the level would stay WARNING and progress lines would
    # vanish.
    core = logging.getLogger("comlrl_core")
    if core.level == logging.NOTSET:
        core.setLevel(logging.INFO)
    late = [name for name in changed if name.startswith("PREFECT_")]
    if late and "prefect" in sys.modules:
        logger.warning("Prefect was imported before its settings were made; it may ignore %s", ", ".join(late))


def _keep_loopback_off_the_proxy() -> None:
    """With a proxy configured, requests to our own servers on the loopback would be sent to it."""
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" in hosts:
            continue
        missing = [host for host in _LOOPBACK if host not in hosts]
        if missing:
            os.environ[name] = ",".join(hosts + missing)
