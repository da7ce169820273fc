import logging
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking import NullTracker, Tracker, flatten
from tasks.tracking_store import ensure_database

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database: making one takes three seconds."""
    root = tmp_path_factory.mktemp("mlflow")
    ensure_database(root)
    return root / "mlflow.db"


@pytest.fixture
def state(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = tmp_path / ".comlrl"
    root.mkdir()
    shutil.copy(database, root / "mlflow.db")
    return root


def runs(tracker: Tracker) -> list[Any]:
    return list(tracker._client.search_runs([tracker._experiment_id], order_by=["attributes.start_time ASC"]))


def history(tracker: Tracker, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in tracker._client.get_metric_history(tracker.run_id, key)]


def test_settings_are_flattened() -> None:
    settings = {
        "seed": 1,
        "agents": [{"model": "a"}, {"model": "b"}],
        "eos": [1, 2],
        "dpo": {"beta": 0.1, "x": None},
    }
    assert flatten(settings) == {
        "seed": "1",
        "agents.0.model": "a",
        "agents.1.model": "b",
        "eos": "[1, 2]",
        "dpo.beta": "0.1",
        "dpo.x": "null",
    }


def test_a_resumed_run_is_found_again_and_no_step_is_logged_twice(state: Path) -> None:
    first = Tracker(state)
    identity = first.open("key", "run", {"seed": 1, "num_iterations": 2}, {"git_commit": "abc"})
    first.log_metrics({"reward": 1.0}, 1)
    first.log_metrics({"reward": 9.0}, 1)
    first.finish("FAILED")

    second = Tracker(state)
    assert second.open("key", "run", {"seed": 1, "num_iterations": 5}) == identity
    second.log_metrics({"reward": 1.0, "length": 3}, 1)
    second.log_metrics({"reward": 2.0}, 2)
    assert history(second, "reward") == [(1, 1.0), (2, 2.0)]
    assert history(second, "length") == [(1, 3.0)]
    (run,) = runs(second)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"seed": "1", "num_iterations": "2"}  # MLflow keeps the first value
    assert run.data.tags["changed.num_iterations"] == "5"
    assert run.data.tags["git_commit"] == "abc"
    second.finish()
    assert runs(second)[0].info.status == "FINISHED"

    other = Tracker(state)
    assert other.open("other key", "run") != identity


def test_every_attempt_at_an_iteration_is_a_nested_run(state: Path) -> None:
    tracker = Tracker(state)
    parent = tracker.open("key", "run")
    with pytest.raises(ValueError), tracker.iteration(3) as child:
        raise ValueError
    with pytest.raises(KeyboardInterrupt), tracker.iteration(3) as child:
        raise KeyboardInterrupt
    with tracker.iteration(3) as child:
        child.log_metrics({"loss": 0.5}, 7)
        child.log_dataset("replay", "d41d8cd98f00b204e9800998ecf8427e.dir", "replay/iteration_0003.json", "replay")
    assert history(child, "loss") == [(7, 0.5)]
    nested = runs(tracker)[1:]
    assert {run.info.run_name for run in nested} == {"iteration-0003"}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent}
    assert [(run.data.tags["comlrl.attempt"], run.info.status) for run in nested] == [
        ("1", "FAILED"),
        ("2", "KILLED"),
        ("3", "FINISHED"),
    ]
    (entry,) = nested[-1].inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("replay", "d41d8cd98f00b204e9800998ecf8427e.dir")
    assert entry.tags[0].value == "replay"


def test_an_over_long_parameter_is_cut_and_kept_in_full_as_an_artifact(state: Path) -> None:
    tracker = Tracker(state)
    tracker.open("key", "run", {"prompt": "x" * 7000, "seed": 1})
    (run,) = runs(tracker)
    assert run.data.params["seed"] == "1"
    assert len(run.data.params["prompt"]) == 6000
    whole = state / "artifacts" / str(tracker.run_id) / "artifacts" / "params" / "prompt.txt"
    assert whole.read_text() == "x" * 7000


def test_a_hundred_and_one_parameters_arrive(state: Path) -> None:
    tracker = Tracker(state)
    tracker.open("key", "run", {f"p{i}": i for i in range(250)})
    assert len(runs(tracker)[0].data.params) == 250


def test_a_nan_metric_becomes_a_tag(state: Path, caplog) -> None:
    tracker = Tracker(state)
    tracker.open("key", "run")
    tracker.log_metrics({"loss": math.nan, "kl": -math.inf, "reward": 1.0, "name": "text", "agent(0)": True}, 4)
    (run,) = runs(tracker)
    assert run.data.metrics == {"reward": 1.0, "agent_0_": 1.0}
    assert run.data.tags["nonfinite.loss"] == "nan at step 4"
    assert run.data.tags["nonfinite.kl"] == "-inf at step 4"
    assert caplog.records == []


def test_policies_become_logged_models_once(state: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "agent_0"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tracker = Tracker(state)
    tracker.open("key", "run")
    identity = tracker.log_policy(folder, "agent_0", {"reward": 0.5}, 3, register_as="team-agent-0")
    assert tracker.log_policy(folder, "agent_0", {"reward": 0.5}, 3, register_as="team-agent-0") == identity
    model = tracker._client.get_logged_model(identity)
    assert str(model.status) == "READY"
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [("agent_0/reward", 0.5, 3)]
    version = tracker._client.get_model_version_by_alias("team-agent-0", "challenger")
    assert version.source == f"models:/{identity}"
    assert str(version.version) == "1"
    assert not Path("mlflow.db").exists()  # MLflow's global default, in the working directory
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_artifacts_are_files_or_folders(state: Path, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "a.html").write_text("a")
    tracker = Tracker(state)
    tracker.open("key", "run")
    tracker.log_artifact(tmp_path / "report" / "a.html", "one")
    tracker.log_artifact(tmp_path / "report", "all")
    listed = [item.path for folder in ("one", "all") for item in tracker._client.list_artifacts(tracker.run_id, folder)]
    assert listed == ["one/a.html", "all/a.html"]


@pytest.mark.parametrize("damage", ["garbage", "empty schema", "folder"])
def test_a_broken_database_is_one_warning_and_no_exception(tmp_path: Path, monkeypatch, caplog, damage: str) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = tmp_path / "mlflow.db"
    if damage == "garbage":
        file.write_bytes(b"no database " * 1000)
    elif damage == "folder":
        file.mkdir()
    else:
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE other (x)")
    tracker = Tracker(tmp_path)
    assert tracker.open("key", "run", {"seed": 1}) is None
    tracker.log_metrics({"loss": 1.0}, 1)
    with tracker.iteration(1) as child:
        child.log_metrics({"loss": 1.0}, 1)
        child.log_artifact(tmp_path / "nothing")
    assert tracker.log_policy(tmp_path, "agent_0", {}, 1) is None
    tracker.finish()
    (record,) = [item for item in caplog.records if item.levelno >= logging.WARNING]
    assert "tracking: open failed, the training goes on" in record.getMessage()


def test_a_failure_in_the_middle_is_one_warning_per_kind(state: Path, tmp_path: Path, caplog) -> None:
    tracker = Tracker(state)
    tracker.open("key", "run")
    with sqlite3.connect(state / "mlflow.db") as connection:
        connection.execute("DROP TABLE metrics")
    for step in range(3):
        tracker.log_metrics({"loss": 1.0}, step)
        tracker.log_artifact(tmp_path / "nothing")
    assert [
        record.getMessage().split(" failed")[0] for record in caplog.records if record.levelno >= logging.WARNING
    ] == [
        "MLflow tracking: log_metrics",
        "MLflow tracking: log_artifact",
    ]


def test_a_killed_run_does_not_stay_running(state: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from tasks.tracking import Tracker\n"
        "tracker = Tracker(Path(sys.argv[1])); tracker.open('dead', 'run')\n"
        "with tracker.iteration(1): os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, state], env=environment, stderr=subprocess.DEVNULL)
    tracker = Tracker(state)
    tracker.open("key", "next run")
    assert sorted(run.info.status for run in runs(tracker)) == ["KILLED", "KILLED", "RUNNING"]
    again = Tracker(state)  # this process lives: its run is left alone
    again.open("third", "run")
    assert sorted(run.info.status for run in runs(again)) == ["KILLED", "KILLED", "RUNNING", "RUNNING"]


def test_a_moved_project_writes_in_its_new_place(state: Path, tmp_path: Path, caplog) -> None:
    code = (  # in its own process: MLflow remembers where a run's artifacts are
        "import sys; from pathlib import Path; from tasks.tracking import Tracker\n"
        "tracker = Tracker(Path(sys.argv[1])); print(tracker.open('key', 'run', {'seed': 1}))\n"
        "tracker.finish()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, state], env=environment, capture_output=True, text=True)
    identity = done.stdout.strip()
    new = tmp_path / "moved" / ".comlrl"
    new.parent.mkdir()
    shutil.move(state, new)
    moved = Tracker(new)
    assert moved.open("key", "run", {"seed": 1}) == identity
    assert "the project moved" in caplog.text
    (tmp_path / "a.txt").write_text("a")
    moved.log_artifact(tmp_path / "a.txt")
    written = new / "artifacts" / str(identity) / "artifacts"
    assert {item.name for item in written.iterdir()} == {"a.txt", "config.json"}
    assert {item.path for item in moved._client.list_artifacts(identity)} == {"a.txt", "config.json"}
    assert not state.exists()


def test_tracking_that_is_off_does_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = NullTracker()
    assert tracker.open("key", "run", {"seed": 1}, {"tag": "x"}) is None
    with tracker.iteration(1) as child:
        child.log_metrics({"loss": 1.0}, 1)
    tracker.log_dataset("a", "b", "c", "d")
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_that_start_together_make_one_database(tmp_path: Path) -> None:
    """MLflow alone failed 3 of 4 here and left a file that no later start repaired."""
    code = (
        "import sys; from pathlib import Path; from tasks.tracking import Tracker\n"
        "tracker = Tracker(Path(sys.argv[1])); print(tracker.open(sys.argv[2], 'run') is not None)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, str(i)],
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["True"] * 4
    assert not list(tmp_path.glob("*.tmp*"))
