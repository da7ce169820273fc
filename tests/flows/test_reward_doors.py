"""The chains that learn from rewards, through every door: the same settings and seed give the same bytes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.files import read_params
from comlrl_core.config.run import RunConfig
from comlrl_core.environments import length_ratio
from comlrl_core.environments.tasks import read_tasks
from comlrl_core.team.formatters import text_formatters
from comlrl_core.trainers.actor_critic import MAACTrainer
from comlrl_core.trainers.preference import MARLHFIterTrainer
from comlrl_core.trainers.reinforce import MAGRPOTrainer
from flows.package_lock import write_lock
from flows.project import Project
from flows.stages import run_stage
from flows.training import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = {
    "num_train": "4",
    "num_eval": "2",
    "max_new_tokens": "8",
    "preference_num_candidates": "3",
    "preference_pairs_per_sample": "2",
    "preference_replay_sample_size": "8",
    "min_reward_gap": "0.0",
    "num_generations": "2",
    "rollout_buffer_size": "2",
    "reward_train_batch_size": "2",
    "samples_per_task": "2",
    "agent_model": "builtin:tiny",
}
ITERATIONS = 2


def small(kind: str, tracked: bool) -> str:
    """The shipped settings of a kind of algorithm, with less of everything, as a project's `params.yaml`."""
    text = (ROOT / f"params.{kind}.yaml").read_text()
    for name, value in SMALL.items():
        text = re.sub(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
    tracking = "" if tracked else "\ntracking:\n  enabled: false\n"
    return text + tracking + "\nepochs: {}\niterations: {}\n"


def results(root: Path) -> dict[str, bytes]:
    """Pairs, policies, reward models and critics."""
    paths = [*(root / "replay").glob("iteration_*[0-9].json"), *(root / "models").rglob("*.safetensors")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def trained_in_python(kind: str, config: RunConfig, tasks: Path, out: Path) -> dict[str, bytes]:
    """The same run by the published trainers; what they leave under the names of a project's last iteration."""
    settings: dict[str, Any] = {"eval_interval": 0}
    trainer: Any = MAACTrainer if kind == "maac" else MAGRPOTrainer
    further = {"external_transition": length_ratio.transition} if kind == "maac" else {}
    if kind == "marlhf":
        settings["preference_replay_dir"] = str(out / "replay")
        trainer = MARLHFIterTrainer
    made = trainer(
        agent_model=config.team.agent_model,
        formatters=text_formatters(2, config.team.templates, None),
        reward_func=config.reward.function,
        args=config.training.model_copy(update=settings),
        train_dataset=read_tasks(tasks),
        **further,
    )
    made.train()
    made.save_model(out / "models" / f"iteration_{ITERATIONS:04d}")
    return results(out)


@pytest.mark.parametrize("kind", ["magrpo", "marlhf", "maac"])
def test_a_run_its_stages_one_by_one_and_the_trainer_write_the_same_bytes(
    small_project: Project, tmp_path: Path, kind: str
) -> None:
    from flows.pipeline import set_iterations

    small_project.params.write_text(small(kind, tracked=False))
    set_iterations(small_project.params, ITERATIONS)
    config = read_params(small_project.params).run_config()
    train(small_project, config)
    whole = results(small_project.work_root)
    assert f"models/iteration_{ITERATIONS:04d}/agent_1/model.safetensors" in whole
    assert (f"models/iteration_{ITERATIONS:04d}/critic/value_head.safetensors" in whole) == (kind == "maac")

    other = Project.at(tmp_path / "other")
    other.work_root.mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(small_project.work_root / name, other.work_root / name)
    write_lock(other.work_root)
    run_stage(other, config, "prepare", None)
    for number in range(1, ITERATIONS + 1):
        run_stage(other, config, "iterate" if kind == "marlhf" else "train", f"{number:04d}")
    assert results(other.work_root) == whole

    tasks = small_project.work_root / "data" / "tasks" / "train.jsonl"
    python = trained_in_python(kind, config, tasks, tmp_path / "python")
    last = f"models/iteration_{ITERATIONS:04d}/"
    assert python == {name: data for name, data in whole.items() if name.startswith((last, "replay/"))}


@pytest.mark.endurance
@pytest.mark.parametrize("kind", ["magrpo", "marlhf"])
def test_plain_embedded_and_dvc_write_the_same_bytes(shell: Any, tmp_path: Path, kind: str) -> None:
    doors = {"plain": ("comlrl", "run", "--plain"), "embedded": ("comlrl", "run"), "dvc": ("dvc", "repro")}
    written = {}
    for name, command in doors.items():
        project = tmp_path / name / "project"
        project.parent.mkdir()
        shell.run(project.parent, "comlrl", "init", project.name)
        (project / "params.yaml").write_text(small(kind, tracked=True))
        shell.run(project, "comlrl", "iterations", str(ITERATIONS))
        shell.run(project, "comlrl", "init")
        shell.run(project, *command)
        assert shell.repro(project) == []
        written[name] = shell.results(project)
    assert written["plain"] == written["embedded"] == written["dvc"]
