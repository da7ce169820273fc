"""Whole projects, made by `comlrl init`, run through every door; the settings are as small as they can be.

Projects are made once for the module. A test that changes one works in a copy.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from comlrl_core.config.files import read_params
from comlrl_core.config.run import PreferenceRun
from comlrl_core.environments.tasks import read_tasks
from comlrl_core.files import read_json
from comlrl_core.preference.files import read_iteration, read_meta
from comlrl_core.store import Store
from comlrl_core.team.formatters import text_formatters
from comlrl_core.trainers.preference import MADPOIterTrainer
from flows import cli
from tasks.evaluate import read_curve

pytestmark = pytest.mark.slow

BIN = Path(sys.prefix) / "bin"
SMALL = {
    "num_train": "4",
    "num_eval": "4",
    "max_new_tokens": "12",
    "preference_num_candidates": "4",
    "preference_pairs_per_sample": "2",
    "min_reward_gap": "0.0",
    "rollout_buffer_size": "4",
    "train_batch_size": "4",
    "logging_steps": "4",
    "samples_per_task": "2",
}
STAGES = ("prepare", "iterate@0001", "iterate@0002", "evaluate", "report")
OURS = ("COMLRL", "DVC", "MLFLOW", "PREFECT", "GIT_")


# Running commands
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process's environment without what a developer's shell says about other projects; put back at the end."""
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
    yield
    os.environ.clear()
    os.environ.update(before)


def run(folder: Path, *command: str, code: int = 0) -> str:
    """Run a command in `folder`; its output, stderr after stdout."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{output}"
    return output


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    return run(folder, "git", *identity, *arguments)


def here(folder: Path, *arguments: str, code: int = 0) -> str:
    """The `comlrl` command in this process, which has imported PyTorch already; what it prints."""
    environment, directory, argv = dict(os.environ), os.getcwd(), sys.argv
    sys.argv = ["comlrl", *arguments]
    os.chdir(folder)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            cli.main()
        assert code == 0, printed.getvalue()
    except SystemExit as ended:
        assert ended.code == code, printed.getvalue()
    finally:
        sys.argv = argv
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
    return printed.getvalue()


def repro(folder: Path, *command: str) -> list[str]:
    """The stages that `dvc repro` (or another command that calls it) runs."""
    output = run(folder, *(command or ("dvc", "repro")))
    ran = re.findall(r"Running stage '(.+?)'", output)
    if not ran:
        assert "up to date" in output
    return ran


def copied(project: Path, to: Path) -> Path:
    """A copy to change. DVC's cache is shared, since it is only added to."""
    shutil.copytree(project, to / "project", ignore=shutil.ignore_patterns("cache"))
    shutil.copytree(project / ".dvc" / "cache", to / "project" / ".dvc" / "cache", copy_function=os.link)
    return to / "project"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def shrink(project: Path, iterations: int = 2) -> None:
    """Small settings in `params.yaml`; comments and all else stay."""
    params = project / "params.yaml"
    text = params.read_text()
    for name, value in SMALL.items():
        text, count = re.subn(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
        assert count == 1, name
    params.write_text(text)
    run(project, "comlrl", "iterations", str(iterations))


def made(folder: Path) -> Path:
    run(folder.parent, "comlrl", "init", folder.name)
    shrink(folder)
    return folder


def results(root: Path) -> dict[str, bytes]:
    """What every door must write alike: pairs and weights."""
    paths = [*(root / "replay").glob("iteration_*[0-9].json"), *(root / "models").rglob("model.safetensors")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def outputs(root: Path) -> dict[str, bytes]:
    """All bytes that DVC keeps of a project's iterations, and its figures."""
    paths = [p for name in ("data", "replay", "models", "state", "plots") for p in (root / name).rglob("*")]
    paths.append(root / "metrics.json")
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths if p.is_file() and p.name != ".gitignore"}


# Projects
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(clean: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without git; run by `comlrl run --plain`."""
    project = made(tmp_path_factory.mktemp("plain") / "project")
    output = run(project, "comlrl", "run", "--plain")
    assert "UserWarning" not in output and "Traceback" not in output
    assert output.count("iteration   ") == 3 and "next:" in output
    return project


@pytest.fixture(scope="module")
def embedded(clean: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a git repository; run by `comlrl run`, with Prefect's API embedded."""
    project = tmp_path_factory.mktemp("embedded") / "project"
    project.mkdir()
    git(project, "init", "-q")
    made(project)
    output = run(project, "comlrl", "run")
    assert "Beginning subflow run 'iteration-0002'" in output and "Traceback" not in output
    assert not any("prefect" in " ".join(words) and str(project) in " ".join(words) for words in commands())
    return project


@pytest.fixture(scope="module")
def subfolder(clean: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a git repository; run by `dvc repro`."""
    repository = tmp_path_factory.mktemp("repository")
    git(repository, "init", "-q")
    project = made(repository / "project")
    assert repro(project) == list(STAGES)
    return project


def commands() -> list[list[str]]:
    """The command lines of all processes."""
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


# Prefect, DVC and Python agree
# ---------------------------------------------------------------------------------------------------


def test_after_a_plain_run_dvc_has_nothing_to_do(plain: Path) -> None:
    assert repro(plain) == []
    assert repro(plain) == []
    assert repro(plain, "comlrl", "repro") == []


def test_after_a_run_with_prefect_dvc_has_nothing_to_do(embedded: Path) -> None:
    assert repro(embedded) == []


def test_a_second_repro_runs_nothing(subfolder: Path) -> None:
    assert repro(subfolder) == []


def test_a_second_run_does_nothing(plain: Path, tmp_path: Path) -> None:
    project = copied(plain, tmp_path)
    before = outputs(project)
    printed = here(project, "run", "--plain")
    assert printed.count("everything is up to date") == 1
    assert outputs(project) == before


def test_every_door_writes_the_same_bytes(plain: Path, embedded: Path, subfolder: Path) -> None:
    assert outputs(plain) == outputs(embedded) == outputs(subfolder)
    assert len(results(plain)) == 2 + 3 * 2  # pairs of two iterations; three teams of two agents
    assert str(plain).encode() not in b"".join(outputs(plain).values())


def test_the_python_trainer_writes_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    config = read_params(plain / "params.yaml").run_config()
    folders = {
        "preference_replay_dir": str(tmp_path / "replay"),
        "policy_checkpoint_dir": str(tmp_path / "models"),
    }
    trainer = MADPOIterTrainer(
        agent_model=config.team.agent_model,
        formatters=text_formatters(2, config.team.templates, None),
        reward_func="builtin:length_ratio",
        args=config.training.model_copy(update=folders),
        train_dataset=read_tasks(plain / "data/tasks/train.jsonl"),
    )
    trainer.train()
    assert results(tmp_path) == results(plain)
    assert read_meta(tmp_path / "replay", 2) == read_meta(plain / "replay", 2)


def test_one_iteration_more_runs_that_one_and_evaluates(embedded: Path, tmp_path: Path) -> None:
    """In a git repository, with a commit before it: `dvc metrics diff` and `dvc plots diff` show what it changed."""
    project = copied(embedded, tmp_path)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "two iterations")
    assert not re.search(r"(?m)^(models|state|replay|\.comlrl)/", git(project, "ls-files"))
    before = results(project)
    run(project, "comlrl", "iterations", "3")
    assert "# " in (project / "params.yaml").read_text()
    assert repro(project, "comlrl", "repro") == ["iterate@0003", "evaluate", "report"]
    assert before.items() < results(project).items()
    assert repro(project) == []

    diff = run(project, "dvc", "metrics", "diff", "--md")
    assert "evaluation.final_reward" in diff and "training.updates" in diff
    rows = read_curve(project / "plots/evaluation.csv")
    assert len(rows) == 4
    vega = run(project, "dvc", "plots", "diff", "HEAD", "--show-vega", "--targets", "plots/evaluation.csv")
    assert "workspace" in vega and "eval_reward_mean" in vega and str(rows[-1]["eval_reward_mean"]) in vega


def test_dvc_reads_metrics_and_plots(plain: Path, tmp_path: Path) -> None:
    shown = run(plain, "dvc", "metrics", "show", "--json")
    final = read_json(plain / "metrics.json")["evaluation"]["final_reward"]
    assert str(final) in shown
    columns = {"evaluation": "eval_reward_mean", "collection": "turn_1_reward_mean", "training": "loss"}
    vega = run(plain, "dvc", "plots", "show", "--json", "--out", str(tmp_path))
    for name, column in columns.items():
        rows = read_curve(plain / f"plots/{name}.csv")
        assert all(column in row for row in rows)
        assert f"plots/{name}.csv" in vega and str(rows[-1][column]) in vega


def test_another_beta_runs_all_iterations(plain: Path, tmp_path: Path) -> None:
    project = copied(plain, tmp_path)
    edit(project / "params.yaml", "dpo_beta: 0.3", "dpo_beta: 0.2")
    before = results(project)
    changed = run(project, "dvc", "status")
    assert "iterate@0001" in changed and "iterate@0002" in changed and "prepare" not in changed
    printed = here(project, "run", "--plain")
    assert re.findall(r"(prepare|iterate@\d+|evaluate) is up to date", printed) == ["prepare"]
    assert repro(project) == []
    after = results(project)
    assert {name for name in before if before[name] != after[name]} == {
        *(f"models/iteration_{n:04d}/agent_{a}/model.safetensors" for n in (1, 2) for a in (0, 1)),
        "replay/iteration_0002.json",
    }

    # The former settings again: nothing is computed, DVC has it all.
    edit(project / "params.yaml", "dpo_beta: 0.2", "dpo_beta: 0.3")
    assert "pairs from" not in here(project, "run", "--plain")
    assert results(project) == before


def test_other_sections_rerun_no_iteration(plain: Path, tmp_path: Path) -> None:
    project = copied(plain, tmp_path)
    edit(project / "params.yaml", "experiment: comlrl", "experiment: other")
    edit(project / "params.yaml", "samples_per_task: 2", "samples_per_task: 3")
    changed = run(project, "dvc", "status")
    assert "evaluate" in changed and "iterate" not in changed and "prepare" not in changed


def test_the_users_reward_file_is_a_dependency(plain: Path, tmp_path: Path) -> None:
    project = copied(plain, tmp_path)
    params, rewards, pipeline = (project / name for name in ("params.yaml", "my_rewards.py", "dvc.yaml"))
    comments = pipeline.read_text().count("#")
    edit(params, "function: builtin:length_ratio", "function: my_rewards.py:many_vowels")
    edit(rewards, "aeiou", "aeiouy")
    here(project, "run", "--plain")
    assert pipeline.read_text().count("- my_rewards.py") == 2  # iterate and evaluate
    assert pipeline.read_text().count("#") == comments + 2
    assert repro(project) == []
    record = read_iteration(project / "replay/iteration_0001.json")[0]
    assert record.oracle is not None and record.oracle.startswith("my_rewards.py:many_vowels@")

    edit(rewards, "aeiouy", "aeiouwy")
    changed = run(project, "dvc", "status")
    assert "iterate@0001" in changed and "evaluate" in changed and "prepare" not in changed
    printed = here(project, "run", "--plain")
    assert re.findall(r"(\S+) is up to date", printed) == ["prepare"]
    assert read_iteration(project / "replay/iteration_0001.json")[0].oracle != record.oracle
    assert repro(project) == []

    edit(params, "function: my_rewards.py:many_vowels", "function: builtin:length_ratio")
    here(project, "run", "--plain")
    assert "my_rewards.py" not in pipeline.read_text()
    assert results(project) == results(plain)


def test_a_constant_reward_ends_cleanly(plain: Path, tmp_path: Path) -> None:
    """No pair, ties counted, no update; every iteration runs."""
    project = copied(plain, tmp_path)
    (project / "my_rewards.py").write_text("def half(first, second):\n    return [0.5] * len(first)\n")
    edit(project / "params.yaml", "function: builtin:length_ratio", "function: my_rewards.py:half")
    here(project, "run", "--plain")
    for number in (1, 2):
        assert read_iteration(project / f"replay/iteration_{number:04d}.json") == []
        assert read_meta(project / "replay", number)["counts"]["ties"] > 0
    store = Store.below(project)
    assert store.manifest(2).policy == store.manifest(0).policy
    assert read_json(project / "metrics.json")["evaluation"]["final_reward"] == 0.5
    assert "training" not in read_json(project / "metrics.json")
    assert repro(project) == []


def test_other_settings_leave_the_project_alone(plain: Path, tmp_path: Path) -> None:
    project = copied(plain, tmp_path)
    before, lock = outputs(project), (project / "dvc.lock").read_bytes()
    here(project, "run", "--plain", "--set", "training.dpo_beta=0.2", "--set", "training.seed=7")
    (folder,) = (project / "runs").iterdir()
    config = read_params(folder / "params.yaml").run_config()
    assert (config.training.dpo_beta, config.training.seed) == (0.2, 7)
    assert len(results(folder)) == len(results(project)) and results(folder) != results(project)
    assert (folder / "metrics.json").is_file()
    assert outputs(project) == before and (project / "dvc.lock").read_bytes() == lock
    assert repro(project) == []


def test_mlflow_shows_the_run(plain: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{plain / '.comlrl' / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("comlrl")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [entry for entry in runs if "mlflow.parentRunId" not in entry.data.tags]
    children = [entry for entry in runs if entry.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(child.info.run_name for child in children) == ["iteration-0001", "iteration-0002"]
    assert {entry.info.status for entry in runs} == {"FINISHED"}

    manifests = [Store.below(plain).manifest(number) for number in range(3)]
    steps = [manifest.environment_steps for manifest in manifests]
    curve = read_curve(plain / "plots/evaluation.csv")
    logged = client.get_metric_history(parent.info.run_id, "eval/reward_mean")
    assert [(m.step, m.value) for m in logged] == [
        (step, row["eval_reward_mean"]) for step, row in zip(steps, curve, strict=True)
    ]
    losses = client.get_metric_history(parent.info.run_id, "train/loss")
    assert losses and all(0 < metric.step <= steps[-1] for metric in losses)
    assert [metric.step for metric in losses] == sorted({metric.step for metric in losses})
    assert parent.data.params["training.dpo_beta"] == "0.3"
    assert parent.data.params["tasks.num_train"] == "4"
    assert {"version.torch", "version.comlrl", "algorithm"} <= parent.data.tags.keys()

    contexts = {i.tags[0].value: i.dataset for i in parent.inputs.dataset_inputs}
    lock = (plain / "dvc.lock").read_text()
    assert set(contexts) == {"training", "evaluation"}
    assert all(dataset.digest in lock for dataset in contexts.values())  # DVC knows them by the same digest

    (model,) = client.search_logged_models([experiment.experiment_id])
    assert model.source_run_id == parent.info.run_id
    stored = Path(model.artifact_location.removeprefix("file://"))
    assert (stored / "agent_0/model.safetensors").read_bytes() == (
        plain / "models/iteration_0002/agent_0/model.safetensors"
    ).read_bytes()
    assert any(metric.key.endswith("eval/final_reward") for metric in model.metrics or [])


# Mistakes
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.temperature=-1", ["params.yaml", "training.temperature"]),
        ("reward.function=missing.py:score", ["reward.function", "missing.py"]),
    ],
)
def test_a_mistake_is_said_in_seconds_and_changes_nothing(plain: Path, override: str, named: list[str]) -> None:
    """By the command as users start it; more mistakes are in the tests of the command line."""
    before = {str(p): p.stat().st_mtime_ns for p in plain.rglob("*")}
    start = time.monotonic()
    output = run(plain, "comlrl", "run", "--set", override, code=2)
    assert time.monotonic() - start < 20  # on a machine that others use too
    assert output.startswith("error: ") and "Traceback" not in output
    assert all(name in output for name in named)
    assert {str(p): p.stat().st_mtime_ns for p in plain.rglob("*")} == before


# The deployment
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(
    plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, httpx.Client, dict[str, Any]]]:
    """A project that `comlrl serve` serves: its folder, a client of the API and the deployment. Stopped by Ctrl-C."""
    project = copied(plain, tmp_path_factory.mktemp("served"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = project.parent / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["comlrl", "serve", "--port", str(port), "--mlflow-port", "0"],
            cwd=project,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family: list[psutil.Process] = []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=20, trust_env=False) as client:
            path = "/deployments/name/preference-training/preference-training"
            deployment = wait(lambda: found(client, path), 150, log)
            yield project, client, deployment
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 1
        process.send_signal(signal.SIGINT)
        process.wait(60)
        _, alive = psutil.wait_procs(family, 10)
        assert not alive, [p.cmdline() for p in alive]
        left = [words for words in commands() if str(project) in " ".join(words) or str(port) in words]
        assert not left
        assert "Traceback" not in log.read_text()
    finally:
        for member in [*family, *([] if process.poll() is not None else [psutil.Process(process.pid)])]:
            if member.is_running():
                member.kill()


def found(client: httpx.Client, path: str) -> dict[str, Any] | None:
    try:
        answer = client.get(path)
    except httpx.HTTPError:
        return None
    return answer.json() if answer.is_success else None


def wait(look: Any, seconds: float, log: Path) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (value := look()) is not None:
            return value
        time.sleep(0.5)
    raise AssertionError(f"nothing after {seconds} s:\n{log.read_text()}")


def completed(client: httpx.Client, submitted: httpx.Response, project: Path) -> dict[str, Any]:
    """The flow run that was asked for, when it has ended well."""
    assert submitted.status_code == 201, submitted.text
    path = f"/flow_runs/{submitted.json()['id']}"

    def ended() -> dict[str, Any] | None:
        entry: dict[str, Any] = client.get(path).json()
        return entry if entry["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    entry: dict[str, Any] = wait(ended, 180, project.parent / "serve.log")
    assert entry["state"]["type"] == "COMPLETED", entry["state"]
    return entry


def submit(client: httpx.Client, deployment: dict[str, Any], settings: dict[str, Any], **more: Any) -> httpx.Response:
    """Asked again while Prefect's database is busy with the second deployment (503), as its own clients do."""
    parameters = {**deployment["parameters"], "settings": settings, **more}
    for _ in range(10):
        answer = client.post(f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": parameters})
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(1)
    return answer


def changed_settings(deployment: dict[str, Any], section: str, **changes: Any) -> dict[str, Any]:
    settings = deployment["parameters"]["settings"]
    return {**settings, section: {**settings[section], **changes}}


def test_a_run_from_the_form_has_the_settings_that_were_sent(
    served: tuple[Path, httpx.Client, dict[str, Any]], plain: Path, tmp_path: Path
) -> None:
    """And writes the bytes that `comlrl run --plain` writes with them."""
    project, client, deployment = served
    before = outputs(project)
    settings = changed_settings(deployment, "training", dpo_beta=0.2)
    entry = completed(client, submit(client, deployment, settings), project)
    assert entry["parameters"]["settings"] == settings
    (folder,) = (project / "runs").iterdir()
    config = read_params(folder / "params.yaml").run_config()
    assert config.values() == settings
    other = copied(plain, tmp_path)
    here(other, "run", "--plain", "--set", "training.dpo_beta=0.2")
    assert results(folder) == results(other / "runs" / folder.name)
    assert len(results(folder)) == len(results(project))
    assert outputs(project) == before
    children = client.post(
        "/flow_runs/filter",
        json={"flow_runs": {"parent_flow_run_id": {"any_": [entry["id"]]}}},
    ).json()
    assert {child["name"] for child in children} == {"iteration-0001", "iteration-0002"}
    artifacts = client.post("/artifacts/filter", json={}).json()
    assert {"summary", "pairs-0001", "pairs-0002"} <= {artifact["key"] for artifact in artifacts}


def test_a_run_from_the_form_trains_the_project_on(served: tuple[Path, httpx.Client, dict[str, Any]]) -> None:
    """As a schedule does: the settings of the project, and one iteration more than it has."""
    project, client, deployment = served
    before = results(project)
    completed(client, submit(client, deployment, deployment["parameters"]["settings"], add_iterations=1), project)
    assert read_params(project / "params.yaml").num_iterations == 3
    assert before.items() < results(project).items()
    assert repro(project) == []


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("training", {"dpo_beta": -1}),
        ("training", {"preference_replay_mode": "newest"}),
        ("training", {"dpo_betta": 0.2}),
        ("team", {"agent": "builtin:tiny"}),
    ],
)
def test_the_form_refuses_what_the_settings_refuse(
    served: tuple[Path, httpx.Client, dict[str, Any]], section: str, change: dict[str, Any]
) -> None:
    _, client, deployment = served
    answer = submit(client, deployment, changed_settings(deployment, section, **change))
    assert answer.status_code in (409, 422), answer.text


def test_the_form_says_what_is_allowed(served: tuple[Path, httpx.Client, dict[str, Any]]) -> None:
    _, _, deployment = served
    schema = deployment["parameter_openapi_schema"]
    definitions = schema["definitions"]
    assert schema["properties"]["settings"]["description"]
    for name, definition in definitions.items():
        if definition["type"] != "object":
            continue
        assert definition["additionalProperties"] is False, name
        for field, about in definition["properties"].items():
            # A section whose own description says the same has it there alone.
            section = definitions.get(about.get("$ref", "").rpartition("/")[2], {})
            assert about.get("description") or section.get("description"), f"{name}.{field}"
    fields = definitions[PreferenceRun.form_of.__name__]["properties"]
    assert fields["dpo_beta"]["exclusiveMinimum"] == 0
    assert fields["temperature"]["maximum"] == 100
    assert fields["comparator_policy"]["enum"][0] == "current"
    assert set(fields["preference_replay_mode"]["enum"]) == {"current", "nearest_k", "all_history", "lambda_decay"}
    assert deployment["enforce_parameter_schema"] is True


def test_the_schedule_is_there_and_switched_off(served: tuple[Path, httpx.Client, dict[str, Any]]) -> None:
    _, _, deployment = served
    (schedule,) = deployment["schedules"]
    assert schedule["active"] is False and schedule["schedule"]["cron"]


# Learning
# ---------------------------------------------------------------------------------------------------

SHUFFLED = '''
import numpy as np
from comlrl_core.rewards.length_ratio import length_ratio

def shuffled(first, second):
    """The right rewards, each given to another joint answer of the batch: no information is left."""
    rewards = length_ratio(first, second)
    seed = [len(rewards), sum(map(len, first)), sum(map(len, second))]
    return np.random.default_rng(seed).permutation(rewards).tolist()
'''


@pytest.fixture(scope="module")
def shipped(clean: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("shipped") / "project"
    run(project.parent, "comlrl", "init", project.name)
    return project


def test_the_shipped_settings_learn(shipped: Path) -> None:
    run(shipped, "comlrl", "run", "--plain")
    rewards = [row["eval_reward_mean"] for row in read_curve(shipped / "plots/evaluation.csv")]
    assert rewards[0] < 0.45
    assert rewards[-1] >= 0.85
    assert all(after > before - 0.1 for before, after in pairwise(rewards))  # no collapse


@pytest.mark.endurance
def test_shuffled_rewards_teach_nothing(shipped: Path) -> None:
    """The control: the same settings, and an oracle that says nothing about the answer that it is asked about."""
    (shipped / "shuffled.py").write_text(SHUFFLED)
    here(shipped, "run", "--plain", "--set", "reward.function=shuffled.py:shuffled")
    (folder,) = (shipped / "runs").iterdir()
    rewards = [row["eval_reward_mean"] for row in read_curve(folder / "plots/evaluation.csv")]
    assert len(rewards) == 7
    assert rewards[-1] < 0.5
    assert read_json(folder / "metrics.json")["training"]["updates"] > 20
