"""`comlrl doctor`: what this installation and project look like, and what is wrong with them."""

import os
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

from comlrl_core.config.files import read_params
from comlrl_core.errors import ComlrlError
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.loading import load_reward
from comlrl_core.store import Store, latest
from flows import pipeline
from flows.environment import MLFLOW_PORT, PREFECT_PORT
from flows.package_lock import check_lock
from flows.prefect_api import HOST, healthy, read_record
from flows.project import Project, ProjectBusy

PACKAGES = ("comlrl", "torch", "transformers", "datasets", "prefect", "mlflow", "dvc", "pydantic")


def examine(project: Project) -> int:
    """Print what there is; the number of problems found (0 to 99) is the exit code."""
    problems: list[str] = []
    print(f"project       {project.work_root}")
    print(f"state         {project.state_root}")
    print(f"python        {sys.executable} ({sys.version.split()[0]})")
    print("packages      " + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    print(f"threads       OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, {os.cpu_count()} cores")
    _command(project, problems)
    _settings(project, problems)
    _pipeline(project, problems)
    _lock(project)
    _server(project)
    _ports()
    print(f"iterations    newest published: {latest(Store.below(project.work_root))}")
    for problem in problems:
        print(f"PROBLEM       {problem}")
    print("no problems found" if not problems else f"{len(problems)} problem(s)")
    return min(len(problems), 99)


def _command(project: Project, problems: list[str]) -> None:
    """Which `comlrl` a bare `dvc repro` would run."""
    search = f"{os.environ.get('PATH', '')}{os.pathsep}{project.work_root / '.venv' / 'bin'}"
    found = shutil.which("comlrl", path=search)
    print(f"dvc stages    {found or 'no comlrl command found'}")
    if found is None:
        problems.append("`dvc repro` would find no comlrl command: activate the environment, or use `comlrl repro`")
    elif Path(found).resolve().parent != Path(sys.prefix).resolve() / "bin":
        problems.append(f"`dvc repro` would run {found}, which belongs to another environment than {sys.prefix}")


def _settings(project: Project, problems: list[str]) -> None:
    try:
        config = read_params(project.params).run_config()
        reward = load_reward(config.reward.function, config.reward.kwargs, project.work_root)
        Oracle(reward.func, config.training.num_agents, name=reward.name)
    except ComlrlError as error:
        problems.append(str(error))
        return
    print(f"settings      {config.algorithm}, {config.num_iterations} iterations, reward {reward.name}")


def _pipeline(project: Project, problems: list[str]) -> None:
    if not pipeline.is_tracked(project.work_root):
        print("pipeline      not kept by DVC (comlrl init makes it so)")
        return
    print(f"pipeline      {project.dvc_yaml}, DVC repository {pipeline.dvc_root(project.work_root)}")
    problem = check_lock(project.work_root)
    if problem:
        problems.append(f"{problem}; `comlrl init` brings it up to date")


def _lock(project: Project) -> None:
    try:
        project.refuse_if_busy()
        print("lock          free: nobody is writing here")
    except ProjectBusy as busy:
        print(f"lock          {busy}")


def _ports() -> None:
    """Whether the ports that `comlrl serve` asks for are there to be had."""
    said = []
    for port in (PREFECT_PORT, MLFLOW_PORT):
        with socket.socket() as probe:
            probe.settimeout(1.0)
            said.append(f"{port} {'in use' if probe.connect_ex((HOST, port)) == 0 else 'free'}")
    print(f"ports         {', '.join(said)}  (comlrl serve --port, --mlflow-port)")


def _server(project: Project) -> None:
    record = read_record(project.state_root)
    url = os.environ.get("PREFECT_API_URL") or (record or {}).get("url")
    state = (
        "answers" if url and healthy(str(url)) else "does not answer" if url else "none running (comlrl run starts one)"
    )
    print(f"Prefect API   {url or ''} {state}")
