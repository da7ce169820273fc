"""Algorithms that learn from rewards, through the pipeline: the same chain, skipping and resuming as for pairs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from comlrl_core.config.files import read_params, read_yaml
from comlrl_core.config.run import PreferenceRun, RewardRun, RunConfig
from flows.pipeline_files import set_iterations
from flows.serving import sibling

BIN = Path(sys.prefix) / "bin"
TRAINING = """training:
  num_agents: 2
  seed: 1
  num_threads: 1
  max_new_tokens: 8
  temperature: 1.0
  top_p: 1.0
  top_k:
  num_generations: 2
  num_turns: 1
  early_termination_threshold:
  rollout_buffer_size: 2
  agent_learning_rate: 2e-3
"""


def to_rewards(params: Path, algorithm: str = "magrpo") -> None:
    """Turn a project's settings into those of an algorithm that learns from rewards, as a person would by hand."""
    text = params.read_text()
    text = re.sub(r"(?m)^algorithm: .*$", f"algorithm: {algorithm}", text)
    text = re.sub(r"(?ms)^training:\n.*?(?=^evaluation:)", TRAINING, text)
    text = text.replace("num_train: 48", "num_train: 3").replace("num_eval: 48", "num_eval: 2")
    params.write_text(text)


@pytest.fixture
def params(tmp_path: Path) -> Path:
    from flows.setup import TEMPLATES

    root = Path(__file__).parents[2]
    assert "params.yaml" in TEMPLATES.values()
    path = tmp_path / "params.yaml"
    path.write_text((root / "params.yaml").read_text())
    return path


def test_iterations_moves_the_chain_to_the_mapping_of_the_algorithm_and_back(params: Path) -> None:
    before = params.read_text()
    to_rewards(params)
    with pytest.raises(ValueError, match="comlrl iterations 6"):
        read_params(params)
    set_iterations(params, 2)
    values = read_yaml(params)
    assert values["iterations"] == {}
    assert values["epochs"] == {"0001": {"previous": "0000"}, "0002": {"previous": "0001"}}
    assert read_params(params).run_config().training.num_train_epochs == 2
    params.write_text(params.read_text().replace("algorithm: magrpo", "algorithm: madpo_iter"))
    set_iterations(params, 6)
    back = read_yaml(params)
    assert (back["iterations"], back["epochs"]) == (read_yaml_text(before)["iterations"], {})


def read_yaml_text(text: str) -> dict[str, object]:
    from ruamel.yaml import YAML

    return dict(YAML(typ="safe").load(text))


def test_each_deployment_has_a_form_of_its_own_kind(params: Path) -> None:
    config = read_params(params).run_config()
    reward = sibling(config, RewardRun)
    assert isinstance(reward, RewardRun) and reward.algorithm == "magrpo"
    assert reward.training.seed == config.training.seed and reward.training.max_new_tokens == 40
    again = sibling(RunConfig.model_validate(reward.values()), PreferenceRun)
    assert again.algorithm == "madpo_iter"
    assert sibling(config, PreferenceRun).values() == config.values()


@pytest.mark.parametrize("algorithm", ["magrpo", "marloo", "maremax", "mareinforce", "maac", "iac"])
def test_what_a_form_sends_at_its_default_fits_every_algorithm_of_the_family(algorithm: str) -> None:
    sent = RewardRun(training={"num_turns": 1}).values()
    config = RewardRun.model_validate({**sent, "algorithm": algorithm})
    assert config.training.num_generations == 4 and config.needs_critic() == (algorithm in ("maac", "iac"))
    for name, field in type(config.training).model_fields.items():
        if name == "advantage_mode":
            assert field.default == config.training.advantage_mode


@pytest.mark.parametrize(
    ("algorithm", "training", "message"),
    [
        ("maac", {"num_turns": 1, "joint_mode": "cross"}, "joint_mode"),
        ("maac", {"num_turns": 1, "use_separate_critic": False}, "use_separate_critic"),
        ("iac", {"num_turns": 1, "use_separate_critic": False, "critic_model_name": "x"}, "critic_model_name"),
        ("magrpo", {"num_turns": 1, "critic_type": "q"}, "critic_type"),
        ("magrpo", {"num_turns": 1, "num_generations": 1}, "num_generations"),
    ],
)
def test_what_a_form_sends_of_another_algorithm_is_refused(algorithm: str, training: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardRun.model_validate({"algorithm": algorithm, "training": training})


@pytest.mark.slow
def test_passes_are_a_chain_of_stages_that_grows_and_has_nothing_to_do_twice(tmp_path: Path) -> None:
    project = tmp_path / "project"
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "COMLRL_PROGRESS": "0",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=project if project.is_dir() else tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("comlrl", "init", str(project))
    to_rewards(project / "params.yaml")
    run("comlrl", "iterations", "2")
    run("comlrl", "run", "--plain")
    weights = (project / "models/iteration_0002/agent_1/model.safetensors").read_bytes()
    assert "up to date" in run("dvc", "repro")
    run("comlrl", "iterations", "3")
    assert re.findall(r"Running stage '(.+?)'", run("comlrl", "repro")) == ["train@0003", "evaluate", "report"]
    assert (project / "models/iteration_0002/agent_1/model.safetensors").read_bytes() == weights
    assert (project / "report.html").is_file()
    run("comlrl", "run", "--set", "training.agent_learning_rate=1e-3", "--set", "num_iterations=1")
    assert len(list((project / "runs").iterdir())) == 1
