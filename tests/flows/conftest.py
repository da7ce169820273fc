"""Projects with settings as small as they can be: without DVC for tests in this process, and by the real commands."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import flows
from comlrl_core.config.files import apply_overrides, read_yaml, resolve
from comlrl_core.config.run import RunConfig
from flows.project import Project
from flows.setup import TEMPLATES
from tasks.loading import forget

SMALL = {
    "num_train": "3",
    "num_eval": "2",
    "max_new_tokens": "8",
    "preference_num_candidates": "3",
    "preference_pairs_per_sample": "2",
    "min_reward_gap": "0.0",
    "rollout_buffer_size": "2",
    "train_batch_size": "2",
    "samples_per_task": "2",
    "enabled": "false",
}
OURS = ("COMLRL", "DVC", "MLFLOW", "PREFECT", "GIT_")
BIN = Path(sys.prefix) / "bin"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What the command line does to our loggers goes with it."""
    loggers = [logging.getLogger(name) for name in ("comlrl_core", "flows", "tasks")]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Nothing that a developer's shell says about other projects; and what a test sets goes with it."""
    before, threads = dict(os.environ), torch.get_num_threads()
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ["COMLRL_PROGRESS"] = "0"
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)
    forget()


@pytest.fixture
def small_project(tmp_path: Path, own_environment: None) -> Project:
    """The files that `comlrl init` gives a project, small settings for two iterations, no DVC repository."""
    root = tmp_path / "project"
    root.mkdir()
    templates = Path(flows.__file__).parent / "templates"
    for template, name in TEMPLATES.items():
        if not name.startswith("."):
            shutil.copy(templates / template, root / name)
    params = root / "params.yaml"
    text = params.read_text()
    for name, value in SMALL.items():
        text, count = re.subn(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
        assert count == 1, name
    params.write_text(text)
    from flows.pipeline import set_iterations

    set_iterations(params, 2)
    return Project.at(root)


@pytest.fixture
def settings_of(small_project: Project) -> Callable[..., RunConfig]:
    """The project's settings with `section.key=value` overrides."""

    def settings(*overrides: str) -> RunConfig:
        values = read_yaml(small_project.params)
        return resolve(apply_overrides(values, overrides), small_project.params)

    return settings


# Slow tests: the commands as users start them
# ---------------------------------------------------------------------------------------------------


class Shell:
    """Commands in project folders, and what they leave: outputs and processes."""

    def run(self, folder: Path, *command: str, code: int = 0) -> str:
        """Run a command; its output, stderr after stdout."""
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
        output = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{output}"
        return output

    def start(self, folder: Path, *command: str) -> "subprocess.Popen[bytes]":
        """Start a command as the leader of a session of its own; its output goes to `log.txt` beside the project."""
        with (folder.parent / "log.txt").open("ab") as log:
            return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def git(self, folder: Path, *arguments: str) -> str:
        identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
        return self.run(folder, "git", *identity, *arguments)

    def project(self, folder: Path, iterations: int = 2, **settings: str) -> Path:
        """`comlrl init` with small settings; comments and all else of `params.yaml` stay."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.run(folder.parent, "comlrl", "init", folder.name)
        params = folder / "params.yaml"
        text = params.read_text()
        for name, value in ({**SMALL, "enabled": "true"} | settings).items():
            text, count = re.subn(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
            assert count == 1, name
        params.write_text(text)
        self.run(folder, "comlrl", "iterations", str(iterations))
        return folder

    def repro(self, folder: Path, *command: str) -> list[str]:
        """The stages that `dvc repro` (or another command that calls it) runs."""
        output = self.run(folder, *(command or ("dvc", "repro")))
        ran = re.findall(r"Running stage '(.+?)'", output)
        assert ran or "up to date" in output, output
        return ran

    def results(self, root: Path) -> dict[str, bytes]:
        """Iteration files, policies and training states; no caches."""
        found = [path for name in ("replay", "models", "state") for path in (root / name).rglob("*")]
        paths = [path for path in found if ".offsets" not in path.parts]  # a cache, which holds times
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths if p.is_file() and p.name != ".gitignore"}

    def processes(self, folder: Path) -> list[psutil.Process]:
        """Processes that work in the folder or name it."""
        found = []
        for process in psutil.process_iter(["cwd", "cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or ())
            inside = f"{process.info['cwd'] or ''}/".startswith(f"{folder}/")
            if process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
                found += [process] if inside or str(folder) in words else []
        return found

    def left(self, folder: Path, seconds: float) -> list[list[str]]:
        """The command lines of the processes that are still there after so many seconds."""
        deadline = time.monotonic() + seconds
        while (found := self.processes(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [process.info["cmdline"] for process in found]

    def wait(self, look: Callable[[], Any], seconds: float, folder: Path) -> Any:
        """What `look` returns once that is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := look():
                return value
            time.sleep(0.05)
        raise AssertionError(f"nothing after {seconds} s:\n{(folder.parent / 'log.txt').read_text()}")

    def finished(self, folder: Path, stage: str, iteration: int) -> bool:
        """Whether a stage of an iteration has ended at least once."""
        path = folder / ".comlrl" / "timings.jsonl"
        entry = f'"iteration": {iteration}, "stage": "{stage}"'
        return path.is_file() and entry in path.read_text()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Commands without what a developer's shell says about other projects; the environment is put back at the end."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ |= {
        "PATH": f"{BIN}{os.pathsep}{before['PATH']}",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "OMP_NUM_THREADS": "1",
        "COMLRL_PROGRESS": "0",
        "DVC_SITE_CACHE_DIR": str(tmp_path_factory.mktemp("site")),
        "DVC_NO_ANALYTICS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    yield Shell()
    os.environ.clear()
    os.environ.update(before)
