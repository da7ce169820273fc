from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from comlrl_core.config.run import RunConfig
from comlrl_core.errors import ConfigError
from comlrl_core.files import iter_jsonl, write_jsonl
from comlrl_core.team.checkpoint import digest_folder
from flows import stages
from flows.jobs import plan
from flows.package_lock import write_lock
from flows.project import Project
from flows.stages import evaluate_policies, export_policies, run_stage
from flows.training import train
from tasks.loading import policy

Settings = Callable[..., RunConfig]


def outputs(root: Path) -> dict[str, bytes]:
    paths = [p for name in ("data", "replay", "models", "state", "plots") for p in (root / name).rglob("*")]
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in [*paths, root / "metrics.json"] if p.is_file()}


def test_stage_by_stage_is_the_same_as_a_run(small_project: Project, settings_of: Settings, tmp_path: Path) -> None:
    config = settings_of()
    train(small_project, config)
    whole = outputs(small_project.work_root)
    other = Project.at(tmp_path / "other")
    other.work_root.mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        (other.work_root / name).write_bytes((small_project.work_root / name).read_bytes())
    write_lock(other.work_root)
    run_stage(other, config, "prepare", None)
    run_stage(other, config, "iterate", "0001")
    run_stage(other, config, "iterate", "0002")
    run_stage(other, config, "evaluate", None)
    run_stage(other, config, "report", None)
    assert outputs(other.work_root) == whole


def test_a_stage_says_that_the_reward_fell_below_what_an_earlier_stage_measured(
    small_project: Project, settings_of: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Under `dvc repro` each iteration is a process of its own."""
    config = settings_of()
    write_lock(small_project.work_root)
    run_stage(small_project, config, "prepare", None)
    run_stage(small_project, config, "iterate", "0001")
    (measured,) = plan(small_project, config).job.evaluations.glob("iteration_0001-team-*.jsonl")
    write_jsonl(measured, [{**row, "reward": 50.0} for _, row in iter_jsonl(measured)])
    assert "reward fell" not in caplog.text
    run_stage(small_project, config, "iterate", "0002")
    run_stage(small_project, config, "evaluate", None)
    run_stage(small_project, config, "report", None)
    assert caplog.text.count("reward fell") == 1
    assert "iteration 2: the evaluation reward fell to " in caplog.text and "from 50.000 (iteration 1)" in caplog.text


@pytest.mark.parametrize(
    ("name", "iteration", "message"),
    [
        ("learn", None, "allowed are prepare, iterate, train, evaluate, report"),
        ("train", "0001", "its stage is iterate"),
        ("iterate", None, "from 0001 to 0002"),
        ("iterate", "0000", "from 0001 to 0002"),
        ("iterate", "0003", "from 0001 to 0002"),
        ("iterate", "last", "from 0001 to 0002"),
        ("prepare", "0001", "belongs to stages iterate and train"),
    ],
)
def test_mistakes_are_named(
    small_project: Project, settings_of: Settings, name: str, iteration: str | None, message: str
) -> None:
    write_lock(small_project.work_root)
    with pytest.raises(ConfigError, match=message):
        run_stage(small_project, settings_of(), name, iteration)
    assert not small_project.models.exists()


def test_a_stage_under_other_code_is_refused(small_project: Project, settings_of: Settings) -> None:
    with pytest.raises(ConfigError, match="comlrl repro"):
        run_stage(small_project, settings_of(), "prepare", None)
    assert not small_project.models.exists()


def test_an_iteration_is_a_flow_run_only_where_a_server_answers(
    small_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering: list[str] = []
    monkeypatch.setattr(stages, "healthy", lambda url: url in answering)
    assert not stages._server(small_project)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert not stages._server(small_project)
    answering.append("http://127.0.0.1:1/api")
    assert stages._server(small_project)


def test_a_failing_stage_is_a_failed_run(
    small_project: Project, settings_of: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(small_project.work_root)
    ended: list[str] = []

    class Recorded(stages.open_tracker(stages.plan(small_project, settings_of())).__class__):  # type: ignore[misc]
        def finish(self, status: str = "FINISHED") -> None:
            ended.append(status)

    def broken(error: BaseException) -> Any:
        def fn(*_: Any) -> None:
            raise error

        return type("Broken", (), {"fn": staticmethod(fn)})

    monkeypatch.setattr(stages, "open_tracker", lambda _: Recorded())
    for error in (RuntimeError("x"), KeyboardInterrupt()):
        monkeypatch.setattr(stages, "prepare", broken(error))
        with pytest.raises(type(error)):
            run_stage(small_project, settings_of(), "prepare", None)
    assert ended == ["FAILED", "KILLED"]


def test_policies_are_evaluated_on_request(small_project: Project, settings_of: Settings) -> None:
    config = settings_of()
    with pytest.raises(ConfigError, match="no policies yet"):
        evaluate_policies(small_project, config, None)
    train(small_project, config)
    newest = evaluate_policies(small_project, config, None)
    assert newest["iteration"] == 2 and 0 <= newest["eval/reward_mean"] <= 1
    assert evaluate_policies(small_project, config, 1)["iteration"] == 1
    with pytest.raises(ConfigError, match=r"iteration 7 is not there; .* holds 0, 1, 2"):
        evaluate_policies(small_project, config, 7)


def test_policies_are_exported_on_request(small_project: Project, settings_of: Settings, tmp_path: Path) -> None:
    """Folders that any tool reads: byte for byte those of the iteration, or adapters worked into their base."""
    config = settings_of()
    with pytest.raises(ConfigError, match="no policies yet"):
        export_policies(small_project, config, tmp_path / "out", None)
    train(small_project, config)
    number, folders = export_policies(small_project, config, tmp_path / "out", None)
    assert number == 2 and [path.name for path in folders] == ["agent_0", "agent_1"]
    for folder in folders:
        assert digest_folder(folder) == digest_folder(small_project.models / "iteration_0002" / folder.name)
    with pytest.raises(ConfigError, match="out exists"):
        export_policies(small_project, config, tmp_path / "out", None)
    with pytest.raises(ConfigError, match="iteration 7 is not there"):
        export_policies(small_project, config, tmp_path / "more", 7)
    with pytest.raises(ConfigError, match=r"belongs to runs with team\.lora"):
        export_policies(small_project, config, tmp_path / "more", 1, adapters=True)
    assert not (tmp_path / "more").exists()


def test_exported_adapters_answer_as_those_in_training(
    small_project: Project, settings_of: Settings, tmp_path: Path
) -> None:
    config = settings_of("team.lora={r: 2}", "num_iterations=1", "training.agent_learning_rate=0.05")
    train(small_project, config)
    job = plan(small_project, config).job
    _, adapters = export_policies(small_project, config, tmp_path / "adapters", None, adapters=True)
    _, whole = export_policies(small_project, config, tmp_path / "whole", None)
    assert not list((tmp_path / "whole").rglob("adapter*"))
    ids = torch.tensor([[5, 6, 7, 8]])
    for agent, (trained, initial) in enumerate(zip(policy(job, 1).models, policy(job, 0).models, strict=True)):
        assert digest_folder(adapters[agent]) == digest_folder(job.store.policy(1) / f"agent_{agent}")
        logits = trained(input_ids=ids).logits
        assert (logits - initial(input_ids=ids).logits).abs().max() > 1e-3  # something was learned
        merged = AutoModelForCausalLM.from_pretrained(whole[agent])
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)
