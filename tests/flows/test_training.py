import logging
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.run import RunConfig
from comlrl_core.errors import ConfigError, RewardError
from comlrl_core.files import iter_jsonl, read_json, write_jsonl
from flows import iteration, training
from flows.jobs import plan
from flows.project import Project, ProjectBusy
from flows.training import git_commit, train, up_to_date
from tasks import collect, update
from tasks.job import Job

Settings = Callable[..., RunConfig]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages in the order in which they are run."""
    made: list[str] = []

    def call(step: Any, job: Any, *rest: Any) -> Any:
        made.append("-".join([step.name, *map(str, rest)]))
        return step.fn(job, *rest)

    monkeypatch.setattr(training, "call", call)
    monkeypatch.setattr(iteration, "call", call)
    return made


@pytest.fixture(scope="module")
def trained_tree() -> dict[str, Path]:
    """Where the first test that needs it leaves a finished run."""
    return {}


@pytest.fixture
def trained(
    small_project: Project,
    settings_of: Settings,
    trained_tree: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Project:
    """The project after a run; trained once, then copied."""
    if not trained_tree:
        train(small_project, settings_of())
        trained_tree["root"] = tmp_path_factory.mktemp("trained") / "project"
        shutil.copytree(small_project.work_root, trained_tree["root"])
    shutil.copytree(trained_tree["root"], small_project.work_root, dirs_exist_ok=True)
    return small_project


def outputs(root: Path) -> dict[str, bytes]:
    paths = [p for name in ("data", "replay", "models", "state", "plots") for p in (root / name).rglob("*")]
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in [*paths, root / "metrics.json"] if p.is_file()}


def stages(number: int) -> list[str]:
    names = ("iteration", "collect", "score", "pair", "sample", "update", "publish", "evaluate")
    return [f"{name}-{number}-0" if name in ("collect", "score") else f"{name}-{number}" for name in names]


def test_a_run_without_dvc_and_prefect(small_project: Project, settings_of: Settings, calls: list[str]) -> None:
    config = settings_of()
    summary = train(small_project, config)
    assert calls == ["prepare", "evaluate-0", *stages(1), *stages(2), "summarize", "report"]
    assert read_json(small_project.metrics) == summary
    before = outputs(small_project.work_root)

    calls.clear()
    assert train(small_project, config) == summary
    assert calls == ["summarize", "report"]  # from the samples that are there
    assert outputs(small_project.work_root) == before
    assert not small_project.lock_file.with_suffix(".json").exists()


def test_an_interrupted_run_goes_on(
    small_project: Project, settings_of: Settings, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    config = settings_of()
    with monkeypatch.context() as broken:
        broken.setattr(update, "learn", killed)
        with pytest.raises(KeyboardInterrupt):
            train(small_project, config)
    assert calls[-1] == "update-1"
    calls.clear()
    monkeypatch.setattr("tasks.collect.collect_answers", only_iteration_two())
    train(small_project, config)
    assert calls == [*stages(1), *stages(2), "summarize", "report"]


def only_iteration_two() -> Callable[..., Any]:
    real = collect.collect_answers

    def answers(*args: Any, **kwargs: Any) -> Any:
        assert kwargs["iteration"] == 2, "answers that were finished are sampled again"
        return real(*args, **kwargs)

    return answers


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("evaluation.samples_per_task=3", {"evaluate"}),
        ("num_iterations=3", {"iterate@0003", "evaluate"}),
        ("training.dpo_beta=0.2", {"iterate@0001", "iterate@0002", "evaluate"}),
        ("training.seed=2", {"prepare", "iterate@0001", "iterate@0002", "evaluate"}),
    ],
)
def test_without_dvc_the_manifests_say_what_is_up_to_date(
    trained: Project, settings_of: Settings, override: str, again: set[str]
) -> None:
    config = settings_of(override)
    planned = plan(trained, settings_of())
    planned = replace(planned, job=planned.job.model_copy(update={"config": config}))
    names = {"prepare": 0} | {f"iterate@{n:04d}": n for n in range(1, config.num_iterations + 1)}
    stale = {name for name, number in names.items() if not up_to_date(planned, name, number)}
    # Iteration 2 hangs on the manifest of iteration 1, which is still the old one here.
    assert stale == again - {"evaluate"}
    assert not up_to_date(planned, "evaluate")


def test_a_reward_that_cannot_be_loaded_stops_before_anything_is_written(
    small_project: Project, settings_of: Settings
) -> None:
    before = {path: path.read_bytes() for path in small_project.work_root.rglob("*") if path.is_file()}
    for override in ("reward.function=missing.py:f", "reward.function=my_rewards.py:nobody", "reward.kwargs={x: 1}"):
        with pytest.raises(ConfigError, match=r"reward\.function"):
            train(small_project, settings_of(override))
    assert {path: path.read_bytes() for path in small_project.work_root.rglob("*") if path.is_file()} == before


def test_an_error_in_a_reward_ends_the_run_by_name(small_project: Project, settings_of: Settings) -> None:
    (small_project.work_root / "my_rewards.py").write_text("def broken(first, second):\n    return [1 / 0]\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        train(small_project, settings_of("reward.function=my_rewards.py:broken"))


def test_a_second_writer_is_told_who_holds_the_project(small_project: Project, settings_of: Settings) -> None:
    with small_project.run_lock("run"), pytest.raises(ProjectBusy, match="comlrl run"):
        train(small_project, settings_of())
    assert not small_project.models.exists()


def test_runs_with_other_settings_do_not_wait_for_the_projects_own(
    small_project: Project, settings_of: Settings
) -> None:
    with small_project.run_lock("run"):
        train(small_project, settings_of("training.seed=2", "num_iterations=1"))
    (folder,) = (small_project.work_root / "runs").iterdir()
    assert (folder / "metrics.json").is_file() and not small_project.models.exists()


def test_edited_task_files_are_noticed_without_dvc(small_project: Project, settings_of: Settings) -> None:
    """Runs in `runs/` have no pipeline that would know their data."""
    tasks = small_project.work_root / "mine.jsonl"
    tasks.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    config = settings_of("tasks.train=mine.jsonl", "num_iterations=1")
    train(small_project, config)
    planned = plan(small_project, config)
    assert up_to_date(planned, "prepare") and up_to_date(planned, "iterate@0001", 1)
    tasks.write_text('{"prompt": "three"}\n{"prompt": "two"}\n')
    assert not up_to_date(planned, "prepare")


def test_a_fall_of_the_reward_is_said_once_whoever_measured_the_best(
    trained: Project, settings_of: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Iteration 1 was evaluated by another process, as before a kill: with rewards of 50, and here of less."""
    store = plan(trained, settings_of()).job.store
    shutil.rmtree(store.policy(2))
    as_good_as(plan(trained, settings_of()).job, 1, 50.0)
    with caplog.at_level(logging.WARNING, "comlrl_core"):
        train(trained, settings_of())
    assert caplog.text.count("iteration 2: the evaluation reward fell to ") == caplog.text.count("reward fell") == 1
    assert "from 50.000 (iteration 1)" in caplog.text


def as_good_as(job: Job, iteration: int, reward: float) -> None:
    """Change the kept evaluation of an iteration."""
    (path,) = job.evaluations.glob(f"iteration_{iteration:04d}-team-*.jsonl")
    write_jsonl(path, [{**row, "reward": reward} for _, row in iter_jsonl(path)])


def test_the_flow_has_a_form() -> None:
    """Postponed annotations would break served runs; so would a parameter without a description."""
    schema = training.preference_training.parameters.model_dump()
    assert training.preference_training.name == "preference-training"
    assert {"settings", "project"} <= schema["properties"].keys()
    assert all(entry.get("description") for entry in schema["properties"].values())
    assert schema["required"] == ["settings"]


def test_every_run_names_its_data_and_its_commit(small_project: Project, settings_of: Settings) -> None:
    """Also one that had nothing to prepare: the tasks are those of the run before it, the settings are not."""
    from mlflow import MlflowClient

    root = small_project.work_root
    git = ["git", "-C", str(root), "-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    assert git_commit(root) == {}
    for words in (["init", "-q"], ["add", "params.yaml"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for beta in ("0.3", "0.2"):
        small_project.params.write_text(small_project.params.read_text().replace("dpo_beta: 0.3", f"dpo_beta: {beta}"))
        train(small_project, settings_of("tracking.enabled=true"))
    uri = f"sqlite:///{small_project.mlflow_db}"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("comlrl")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert {run.data.params["training.dpo_beta"] for run in parents} == {"0.3", "0.2"}
    for run in runs:
        names = sorted(entry.dataset.name for entry in run.inputs.dataset_inputs)
        number = run.info.run_name.removeprefix("iteration-")
        assert names == (["tasks-eval", "tasks-train"] if run in parents else [f"replay-{number}"])
        assert run in parents or len(run.inputs.dataset_inputs[0].dataset.digest) == 32
    assert {run.data.tags["mlflow.source.git.commit"] for run in parents} == {head}
