"""Parameter files and overrides."""

from pathlib import Path

import pytest

from comlrl_core.config.files import apply_overrides, dump_yaml, read_params, read_yaml, resolve
from comlrl_core.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["params.yaml", "params.smollm2.yaml"])
def test_the_shipped_parameter_files_are_good(name: str) -> None:
    params = read_params(ROOT / name)
    training = params.training
    assert params.algorithm == "madpo_iter"
    # What is trained on is what was sampled.
    assert (training.temperature, training.top_p, training.top_k) == (1.0, 1.0, None)
    assert resolve(read_yaml(ROOT / name), name) == params.run_config()


def test_an_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    """In YAML 1.1 `1e-5` is text, and a learning rate of text fails or becomes zero."""
    path = tmp_path / "params.yaml"
    path.write_text("training: {agent_learning_rate: 1e-5, on_bad_reward: drop}\n")
    assert read_yaml(path)["training"]["agent_learning_rate"] == 1e-5
    assert read_params(path).training.agent_learning_rate == 1e-5


def test_overrides_replace_single_values() -> None:
    values = {"num_iterations": 2, "training": {"dpo_beta": 0.1, "seed": 1}, "team": None}
    changed = apply_overrides(
        {**values, "team": {}},
        [
            "training.dpo_beta=0.3",
            "training.agent_learning_rate=1e-5",
            "training.top_k=null",
            "team.templates=['[1] {prompt}', '[2] {prompt}']",
            "reward.kwargs.low=1.5",
        ],
    )
    assert changed["training"] == {"dpo_beta": 0.3, "seed": 1, "agent_learning_rate": 1e-5, "top_k": None}
    assert changed["team"] == {"templates": ["[1] {prompt}", "[2] {prompt}"]}
    assert changed["reward"] == {"kwargs": {"low": 1.5}}
    assert values["training"] == {"dpo_beta": 0.1, "seed": 1}  # a copy was changed


def test_another_number_of_iterations_drops_the_chain_that_no_longer_fits() -> None:
    values = read_yaml(ROOT / "params.yaml")
    count = values["num_iterations"]
    changed = apply_overrides(values, [f"num_iterations={count + 1}"])
    assert "iterations" not in changed and "last_iteration" not in changed
    assert resolve(changed, "params.yaml").num_iterations == count + 1
    assert "iterations" in apply_overrides(values, [f"num_iterations={count}"])
    assert "iterations" in apply_overrides(values, ["training.seed=7"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.dpo_beta", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("training..x=3", "expected section.key=value"),
        ("num_iterations.x=3", "'num_iterations' is a value, not a section"),
        ("training.seed=[1", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        apply_overrides({"num_iterations": 2}, [override])
    assert "--set" in str(refused.value)


@pytest.mark.parametrize(
    "override", ["training.comparator_api_key=[sk-secret", "num_iterations.comparator_api_key=sk-secret"]
)
def test_the_api_key_ends_up_in_an_error(override: str) -> None:
    """Pitfall 34: an override's value may be a key."""
    with pytest.raises(ConfigError) as refused:
        apply_overrides({"num_iterations": 2}, [override])
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"training: [1\n", "line 2: not valid YAML"),
        (b"training: {seed: 1}\ntraining: {seed: 2}\n", "not valid YAML"),
        (b"- 1\n", "a mapping of settings is expected, not list"),
        (b"", "a mapping of settings is expected, not NoneType"),
        (b"team: \xff\n", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_parameter_file_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_params(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such parameter file"):
        read_params(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_params(tmp_path)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    values = read_params(ROOT / "params.yaml").run_config().values()
    path = tmp_path / "again.yaml"
    path.write_text(dump_yaml(values))
    assert read_yaml(path) == values
    assert read_params(path).run_config().values() == values
