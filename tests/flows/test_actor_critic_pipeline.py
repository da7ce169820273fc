"""Actor-critic through the pipeline: critics and their moments beside the policies, the same bytes by every door."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.files import read_params
from comlrl_core.environments import length_ratio as environment
from comlrl_core.environments.tasks import read_tasks
from comlrl_core.store import Store
from comlrl_core.team.checkpoint import digest_folder
from comlrl_core.team.formatters import text_formatters
from comlrl_core.trainers.actor_critic import MAACTrainer

TRAINING = """  num_agents: 2
  seed: 1
  num_threads: 1
  max_new_tokens: 8
  temperature: 1.0
  top_p: 1.0
  top_k:
  num_turns: {turns}
  early_termination_threshold:
  rollout_buffer_size: 4
  agent_learning_rate: 2e-3
  critic_learning_rate: 1e-3
"""


def to_actor_critic(project: Path, algorithm: str, turns: int, **further: str) -> None:
    """Turn a project's settings into those of actor-critic, as a person would by hand."""
    params = project / "params.yaml"
    head, _, rest = params.read_text().partition("training:\n")
    _, _, tail = rest.partition("evaluation:\n")
    lines = "".join(f"  {name}: {value}\n" for name, value in further.items())
    head = head.replace("algorithm: madpo_iter", f"algorithm: {algorithm}")
    if turns > 1:
        head = re.sub(r"(?m)^  transition:.*$", "  transition: builtin:length_ratio", head)
    params.write_text(f"{head}training:\n{TRAINING.format(turns=turns)}{lines}evaluation:\n{tail}")


def critics(root: Path) -> dict[str, bytes]:
    paths = [*root.glob("models/*/critic/**/*"), *root.glob("state/*/engine_critic_*/*")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.slow
@pytest.mark.endurance
def test_maac_by_every_door(shell: Any, tmp_path: Path) -> None:
    project = shell.project(tmp_path / "project")
    to_actor_critic(project, "maac", 2)
    shell.run(project, "comlrl", "iterations", "2")
    shell.run(project, "comlrl", "run", "--plain")
    found = shell.results(project)
    assert "models/iteration_0002/critic/value_head.safetensors" in found
    assert "state/iteration_0002/engine_critic_0/engine.safetensors" in found
    assert not any(name.startswith("models/iteration_0000/critic") for name in found)
    assert shell.repro(project) == []

    other = shell.project(tmp_path / "other" / "project")
    shutil.copy(project / "params.yaml", other / "params.yaml")
    assert shell.repro(other, "comlrl", "repro")[:3] == ["prepare", "train@0001", "train@0002"]
    assert shell.results(other) == found

    config = read_params(project / "params.yaml").run_config()
    trainer = MAACTrainer(
        agent_model="builtin:tiny",
        reward_func="builtin:length_ratio",
        formatters=text_formatters(2, config.team.templates, None),
        args=config.training,
        train_dataset=read_tasks(project / "data" / "tasks" / "train.jsonl"),
        external_transition=environment.transition,
    )
    trainer.train(checkpoint_dir=tmp_path / "python")
    policy, checkpoint = Store.below(project).policy(2), tmp_path / "python" / "epoch_0002"
    for name in ("agent_0", "agent_1", "critic"):
        assert digest_folder(policy / name) == digest_folder(checkpoint / name)

    # A second iteration that was lost is made again from what the first left: policies, critics, moments.
    for name in ("models", "state"):
        shutil.rmtree(project / name / "iteration_0002")
    shell.run(project, "comlrl", "run", "--plain")
    assert shell.results(project) == found


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.parametrize(
    ("backend", "further"), [("maac", {}), ("iac", {"use_separate_critic": "false", "critic_type": "q"})]
)
def test_marlhf_with_critics_resumes_with_the_same_bytes(
    shell: Any, tmp_path: Path, backend: str, further: dict[str, str]
) -> None:
    project = shell.project(tmp_path / "project")
    settings = {
        "rl_algorithm": backend, "num_generations": "2", "num_train_epochs": "1", "preference_num_candidates": "4",
        "preference_pairs_per_sample": "2", "reward_learning_rate": "1e-3", "reward_eval_fraction": "0.0",
        "reward_probe_samples": "3", **further,
    }  # fmt: skip
    to_actor_critic(project, "marlhf_iter", 1, **settings)
    shell.run(project, "comlrl", "iterations", "2")
    shell.run(project, "comlrl", "run", "--plain")
    found, learned = shell.results(project), critics(project)
    assert learned and any(name.startswith("models/iteration_0002/critic") for name in learned)
    heads = [
        sorted(n for n in learned if f"iteration_000{i}" in n and n.endswith("value_head.safetensors")) for i in (1, 2)
    ]
    one, two = learned[heads[0][0]], learned[heads[1][0]]
    assert one != two  # carried on, not begun anew
    for name in ("models", "state"):
        shutil.rmtree(project / name / "iteration_0002")
    (project / "replay" / "iteration_0002.json").unlink()
    (project / "replay" / "iteration_0002.meta.json").unlink()
    shell.run(project, "comlrl", "run", "--plain")
    assert shell.results(project) == found
    assert shell.repro(project) == []
