from collections.abc import Callable
from pathlib import Path

import pytest

from comlrl_core.config.files import read_params
from comlrl_core.config.run import RunConfig
from comlrl_core.errors import ConfigError
from flows.jobs import check_stage, lengthened, open_place, plan, user_files
from flows.package_lock import LOCK_NAME, package_digest, write_lock
from flows.project import Project

Settings = Callable[..., RunConfig]


def test_the_settings_of_the_file_work_in_the_project(small_project: Project, settings_of: Settings) -> None:
    planned = plan(small_project, settings_of())
    assert planned.job.work_root == planned.job.source_root == small_project.work_root
    assert planned.job.code == package_digest()
    assert planned.place == small_project
    assert not planned.tracked  # no DVC repository here


@pytest.mark.parametrize(
    "override",
    [
        "training.dpo_beta=0.2",
        "training.seed=2",
        "evaluation.samples_per_task=3",
        "team.templates=x",
        "num_iterations=3",
    ],
)
def test_other_settings_work_in_a_folder_of_their_own(
    small_project: Project, settings_of: Settings, override: str
) -> None:
    planned = plan(small_project, settings_of(override))
    assert planned.job.work_root == small_project.work_root / "runs" / planned.job.key()
    assert planned.job.source_root == small_project.work_root
    assert planned.project == small_project and planned.place.work_root == planned.job.work_root
    assert not planned.tracked


def test_how_a_run_is_tracked_makes_no_other_run(small_project: Project, settings_of: Settings) -> None:
    planned = plan(small_project, settings_of("tracking.experiment=other"))
    assert planned.job.work_root == small_project.work_root
    assert planned.job.config.tracking.experiment == "other"


def test_the_folder_of_a_run_holds_its_settings(small_project: Project, settings_of: Settings) -> None:
    before = small_project.params.read_bytes()
    config = settings_of("training.agent_learning_rate=1e-5", "num_iterations=3")
    planned = plan(small_project, config)
    open_place(planned)
    again = read_params(planned.place.params)
    assert again.run_config() == config
    assert list(again.iterations or {}) == ["0001", "0002", "0003"] and again.last_iteration == "0003"
    assert small_project.params.read_bytes() == before


def test_more_iterations_are_written_to_the_project(small_project: Project, settings_of: Settings) -> None:
    config = lengthened(small_project, settings_of(), 2)
    assert config.num_iterations == config.training.model_dump()["num_iterations"] == 4
    assert read_params(small_project.params).last_iteration == "0004"
    assert lengthened(small_project, config, 0) == config


def test_only_the_projects_own_run_is_lengthened(small_project: Project, settings_of: Settings) -> None:
    before = small_project.params.read_bytes()
    with pytest.raises(ConfigError, match="add_iterations"):
        lengthened(small_project, settings_of(), -1)
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        lengthened(small_project, settings_of("training.seed=2"), 1)
    assert small_project.params.read_bytes() == before


def test_the_users_files_per_stage(small_project: Project, settings_of: Settings) -> None:
    root = small_project.work_root
    (root / "mine.py").write_text("")
    (root / "tasks.jsonl").write_text("")
    for name in ("base", "rival"):
        (root / name).mkdir()
    config = settings_of(
        "reward.function=my_rewards.py:many_vowels",
        "team.templates=null",
        "team.formatter=mine.py:prompt",
        "team.agent_model=base",
        "tasks.train=tasks.jsonl[:3]",
        "training.comparator_policy=model",
        "training.comparator_model_name=rival",
    )
    files = {
        stage: {path.relative_to(root).as_posix() for path in paths}
        for stage, paths in user_files(plan(small_project, config).job).items()
    }
    assert files == {
        "prepare": {"mine.py", "base", "tasks.jsonl"},
        "iterate": {"mine.py", "my_rewards.py", "rival"},
        "evaluate": {"mine.py", "my_rewards.py"},
    }


def test_built_in_names_are_no_files(small_project: Project, settings_of: Settings) -> None:
    assert not any(user_files(plan(small_project, settings_of()).job).values())


def test_a_stage_is_refused_where_dvc_would_miss_something(small_project: Project, settings_of: Settings) -> None:
    """Run by itself under `dvc repro`, it would record dependencies that are not what it used."""
    job = plan(small_project, settings_of("reward.function=my_rewards.py:many_vowels")).job
    with pytest.raises(ConfigError, match=rf"{LOCK_NAME}.*comlrl repro"):
        check_stage(job, small_project)
    write_lock(small_project.work_root)
    with pytest.raises(ConfigError, match=r"stage iterate does not depend on my_rewards\.py"):
        check_stage(job, small_project)
    check_stage(plan(small_project, settings_of()).job, small_project)


def test_a_settings_file_elsewhere_is_another_run(
    tmp_path: Path, small_project: Project, settings_of: Settings
) -> None:
    small_project.params.unlink()  # `--params other.yaml` in a folder without params.yaml
    planned = plan(small_project, RunConfig())
    assert planned.job.work_root.parent == small_project.work_root / "runs"
