"""A project in git: fetched elsewhere, and varied with DVC's experiments. By the real commands."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.files import read_params
from comlrl_core.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.endurance]

OUTPUTS = ("data/tasks", "replay", "models", "state")
BETA = "training.dpo_beta=0.2"


@pytest.fixture(scope="module")
def committed(shell: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a reward of its own, everything committed that git does not ignore."""
    folder = tmp_path_factory.mktemp("git") / "project"
    folder.mkdir()
    shell.git(folder, "init", "-q")
    shell.project(folder, function="my_rewards.py:many_vowels")
    rewards = folder / "my_rewards.py"
    rewards.write_text(rewards.read_text().replace("aeiou", "aeiouy"))
    shell.run(folder, "comlrl", "run", "--plain")
    shell.git(folder, "add", ".")
    shell.git(folder, "commit", "-qm", "a run")
    return folder


def copied(committed: Path, to: Path) -> Path:
    shutil.copytree(committed, to / "project", symlinks=True)
    return to / "project"


def spoil(project: Path) -> dict[str, bytes]:
    """Replace the project's outputs by junk of the same names: whoever reads them fails, or differs."""
    paths = [path for name in OUTPUTS for path in (project / name).rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o644)
        path.write_bytes(b"junk")
    return everything(project)


def everything(project: Path) -> dict[str, bytes]:
    """All files of a project but the innards of git, of DVC and of tracking."""
    files = (p for p in project.rglob("*") if p.is_file() and not {".git", ".dvc", ".comlrl"} & set(p.parts))
    return {path.relative_to(project).as_posix(): path.read_bytes() for path in files}


def parents(project: Path) -> dict[str, str]:
    """MLflow's parent runs: dpo_beta -> status."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{project / '.comlrl' / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("comlrl")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    found = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return {run.data.params["training.dpo_beta"]: run.info.status for run in found}


def test_git_ignores_what_dvc_keeps_and_nothing_else(shell: Any, committed: Path) -> None:
    tracked = set(shell.git(committed, "ls-files").split())
    assert {"params.yaml", "dvc.yaml", "dvc.lock", "comlrl.lock", "my_rewards.py", "metrics.json"} <= tracked
    assert {"report.html", "plots/evaluation.csv", ".gitignore", ".dvcignore", ".dvc/config"} <= tracked
    assert not [name for name in tracked if name.startswith((*OUTPUTS, ".comlrl", "runs"))]
    assert shell.git(committed, "status", "--porcelain") == ""


def test_a_fresh_clone_has_nothing_to_run(shell: Any, committed: Path, tmp_path: Path) -> None:
    project = copied(committed, tmp_path)
    shell.run(project, "dvc", "remote", "add", "-d", "storage", str(tmp_path / "storage"))
    shell.git(project, "commit", "-qam", "a remote")
    shell.run(project, "dvc", "push")
    shell.git(tmp_path, "clone", "-q", "project", "clone")
    clone = tmp_path / "clone"
    shutil.rmtree(project)
    shell.run(clone, "dvc", "pull")
    assert shell.repro(clone) == []
    assert shell.repro(clone, "comlrl", "repro") == []
    assert everything(clone) == everything(committed)
    assert shell.git(clone, "status", "--porcelain") == ""
    assert "everything is up to date" in shell.run(clone, "comlrl", "run", "--plain")

    # It is a whole project: one more iteration goes on from the fetched optimizer state.
    shell.run(clone, "comlrl", "iterations", "3")
    assert shell.repro(clone) == ["iterate@0003", "evaluate", "report"]


@pytest.fixture(scope="module")
def expected(shell: Any, committed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `dvc exp run` in the workspace makes of another beta: `metrics.json` and `dvc.lock`."""
    project = copied(committed, tmp_path_factory.mktemp("workspace"))
    before = shell.results(project)
    output = shell.run(project, "dvc", "exp", "run", "-S", BETA)
    assert re.findall(r"Running stage '(.+?)'", output) == ["iterate@0001", "iterate@0002", "evaluate", "report"]
    assert read_params(project / "params.yaml").run_config().training.dpo_beta == 0.2
    assert parents(project) == {"0.3": "FINISHED", "0.2": "FINISHED"}
    after = shell.results(project)
    assert after.keys() == before.keys()
    name = "models/iteration_0002/agent_0/model.safetensors"
    assert after[name] != before[name]
    assert shell.repro(project) == []
    return {"metrics": read_json(project / "metrics.json"), "lock": locked(project, project)}


def locked(project: Path, root: Path, revision: str | None = None) -> list[str]:
    """The digests of all outputs that DVC keeps, as `dvc.lock` has them (the report shows seconds: not it)."""
    import subprocess

    command = ["git", "show", f"{revision}:dvc.lock"]
    text = subprocess.check_output(command, cwd=root, text=True) if revision else (project / "dvc.lock").read_text()
    found = re.findall(r"path: ((?:data|models|state|replay)/\S+)\n\s+hash: md5\n\s+md5: (\S+)", text)
    return sorted({f"{name} {digest}" for name, digest in found})


def experiments(project: Path) -> dict[str, str]:
    """Names of the experiments that DVC knows -> their commits."""
    import subprocess

    refs = subprocess.check_output(["git", "for-each-ref", "refs/exps"], cwd=project, text=True)
    found = [line.split() for line in refs.splitlines() if "exec" not in line and "stash" not in line]
    return {name.rpartition("/")[2]: commit for commit, _, name in found}


def test_an_experiment_in_a_copy_never_reads_or_writes_the_original(
    shell: Any, committed: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """`--temp` works in a copy below `.dvc/tmp`; DVC's cache and the tracking are all that it shares."""
    project = copied(committed, tmp_path)
    before = spoil(project)
    lock = project / ".comlrl" / "run.lock"
    stamp = lock.stat().st_mtime_ns
    with lock.open("rb") as held:  # another process works in the original
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        output = shell.run(project, "dvc", "exp", "run", "--temp", "-S", BETA)
    assert re.findall(r"Running stage '(.+?)'", output) == ["iterate@0001", "iterate@0002", "evaluate", "report"]
    assert everything(project) == before
    assert lock.stat().st_mtime_ns == stamp and not lock.with_suffix(".json").exists()
    ((_, commit),) = experiments(project).items()
    assert locked(project, project, commit) == expected["lock"]
    assert parents(project) == {"0.3": "FINISHED", "0.2": "FINISHED"}
    assert shell.git(project, "status", "--porcelain") == ""

    # Its results come into the workspace on request.
    for name in OUTPUTS:
        shutil.rmtree(project / name)
    shell.run(project, "dvc", "exp", "apply", commit)
    assert read_json(project / "metrics.json") == expected["metrics"]
    assert shell.repro(project) == []


def test_queued_experiments_run_one_after_another(
    shell: Any, committed: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    project = copied(committed, tmp_path)
    before = spoil(project)
    for setting in (BETA, "training.dpo_beta=0.1"):
        shell.run(project, "dvc", "exp", "run", "--queue", "-S", setting)
    assert everything(project) == before and experiments(project) == {}
    shell.run(project, "dvc", "queue", "start")
    (tmp_path / "log.txt").write_text("")

    def ended() -> bool:
        states = shell.run(project, "dvc", "queue", "status")
        assert "Failed" not in states, shell.run(project, "dvc", "queue", "logs", states.split()[4])
        return states.count("Success") == 2

    shell.wait(ended, 300, project)
    assert everything(project) == before
    commits = experiments(project).values()
    locks = [locked(project, project, commit) for commit in commits]
    assert len(locks) == 2 and expected["lock"] in locks and locks[0] != locks[1]
    assert parents(project) == {"0.3": "FINISHED", "0.2": "FINISHED", "0.1": "FINISHED"}
    assert shell.left(project, 30) == []
