from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError
from flows.pipeline_files import missing_dependencies, set_iterations, sync_dependencies

PARAMS = """\
# settings of a run
seed: 1   # the seed
preference:
  num_iterations: 2  # follows `iterations`
  dpo_beta: 1e-1
  reward: null
last_iteration: '0002'
iterations:   # written by `comlrl iterations`
  '0001': {previous: '0000'}   # the first
  '0002':
    previous: '0001'

# the agents
agents: [a, "b"]
"""
DVC = """\
stages:
  # tasks
  prepare:
    cmd: prepare
    deps: [comlrl.lock, data/x]  # inputs
    outs:
      - data/tasks
  iterate:
    foreach: ${iterations}
    do:
      cmd: iterate ${key}
      deps:
        - comlrl.lock
        # the one before
        - models/iteration_${item.previous}
      outs:
        - replay/iteration_${key}.json
  evaluate:
    cmd: evaluate
    outs:
      - metrics.json
"""


@pytest.fixture
def params(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path / "params.yaml"


@pytest.fixture
def dvc_yaml(tmp_path: Path) -> Path:
    (tmp_path / "dvc.yaml").write_text(DVC)
    return tmp_path / "dvc.yaml"


def test_more_iterations_add_lines_and_keep_everything_else(params: Path) -> None:
    assert set_iterations(params, 3)
    expected = PARAMS.replace("num_iterations: 2", "num_iterations: 3").replace("'0002'\n", "'0003'\n")
    expected = expected.replace("    previous: '0001'\n", "    previous: '0001'\n  '0003': {previous: '0002'}\n")
    assert params.read_text() == expected


def test_fewer_iterations_remove_lines_and_no_comment_of_the_next_section(params: Path) -> None:
    assert set_iterations(params, 1)
    expected = PARAMS.replace("num_iterations: 2", "num_iterations: 1").replace("'0002'\niter", "'0001'\niter")
    assert params.read_text() == expected.replace("  '0002':\n    previous: '0001'\n", "")


def test_the_same_number_touches_nothing(params: Path) -> None:
    before = params.stat().st_mtime_ns
    assert not set_iterations(params, 2)
    assert params.stat().st_mtime_ns == before
    assert set_iterations(params, 7)
    assert not set_iterations(params, 7)


@pytest.mark.parametrize("n", [0, -1, 10_000, True, 2.0, "3"])
def test_a_number_out_of_bounds_is_refused(params: Path, n: object) -> None:
    with pytest.raises(ConfigError, match="from 1 to 9999"):
        set_iterations(params, n)  # type: ignore[arg-type]
    assert params.read_text() == PARAMS


def test_wrong_and_unquoted_entries_are_rewritten(params: Path) -> None:
    """`0001` without quotes is the integer 1 for DVC, whose stage would be `iterate@1`."""
    params.write_text("num_iterations: 3\nlast_iteration: 0003\niterations:\n    0001: {previous: 0000}\n    x: {}\n")
    assert set_iterations(params, 2)
    assert params.read_text() == (
        "num_iterations: 2\nlast_iteration: '0002'\niterations:\n"
        "    '0001': {previous: '0000'}\n    '0002': {previous: '0001'}\n"
    )


@pytest.mark.parametrize("mapping", ["iterations: {}  # none\n", "iterations:  # none\n", "iterations: null  # none\n"])
def test_empty_mappings_are_filled(params: Path, mapping: str) -> None:
    params.write_text(f"num_iterations: 0\nlast_iteration:\n{mapping}seed: 1\n")
    assert set_iterations(params, 1)
    entry = "iterations:  # none\n  '0001': {previous: '0000'}\n"
    assert params.read_text() == f"num_iterations: 1\nlast_iteration: '0001'\n{entry}seed: 1\n"


def test_missing_keys_are_added_at_the_end(params: Path) -> None:
    params.write_text("seed: 1")
    assert set_iterations(params, 1)
    assert params.read_text() == (
        "seed: 1\nnum_iterations: 1\nlast_iteration: '0001'\niterations:\n  '0001': {previous: '0000'}\n"
    )


def test_line_breaks_of_windows_stay(params: Path) -> None:
    params.write_bytes(PARAMS.replace("\n", "\r\n").encode())
    set_iterations(params, 4)
    assert params.read_bytes().count(b"\n") == params.read_bytes().count(b"\r\n") == PARAMS.count("\n") + 2


def test_files_that_are_no_settings_are_refused_by_name(params: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        set_iterations(tmp_path / "none.yaml", 2)
    params.write_text("a: [")
    with pytest.raises(ConfigError, match=r"params\.yaml is not valid YAML"):
        set_iterations(params, 2)
    params.write_text("a: {num_iterations: 1}\nb: {num_iterations: 2}\n")
    with pytest.raises(ConfigError, match="num_iterations in 2 places"):
        set_iterations(params, 2)


def test_user_files_become_dependencies_and_leave_again(dvc_yaml: Path) -> None:
    files = ["my_rewards.py", dvc_yaml.parent / "base model"]
    assert missing_dependencies(dvc_yaml, files) == {
        stage: ["my_rewards.py", "base model"] for stage in ("prepare", "iterate", "evaluate")
    }
    assert sync_dependencies(dvc_yaml, files)
    text = dvc_yaml.read_text()
    assert (
        '        - my_rewards.py  # from params.yaml\n        - "base model"  # from params.yaml\n      outs:' in text
    )
    assert "        # the one before\n" in text
    assert "    deps:  # inputs\n      - comlrl.lock\n      - data/x\n      - my_rewards.py" in text
    assert "  evaluate:\n    deps:\n      - my_rewards.py" in text
    assert not sync_dependencies(dvc_yaml, files)
    assert missing_dependencies(dvc_yaml, files) == {}
    assert sync_dependencies(dvc_yaml, ["/elsewhere/rewards.py"])
    assert dvc_yaml.read_text().count("/elsewhere/rewards.py  # from") == 3
    assert "my_rewards.py" not in dvc_yaml.read_text()
    assert sync_dependencies(dvc_yaml, [])
    block = "    deps:  # inputs\n      - comlrl.lock\n      - data/x\n"
    assert dvc_yaml.read_text() == DVC.replace("    deps: [comlrl.lock, data/x]  # inputs\n", block)


def test_dependencies_that_the_user_wrote_are_neither_doubled_nor_removed(dvc_yaml: Path) -> None:
    assert sync_dependencies(dvc_yaml, {"prepare": ["data/x"], "iterate": ["comlrl.lock", "r.py"]})
    assert dvc_yaml.read_text().count("data/x") == 1
    assert dvc_yaml.read_text().count("r.py") == 1
    assert sync_dependencies(dvc_yaml, {})
    assert dvc_yaml.read_text() == DVC


def test_a_missing_stage_is_named(dvc_yaml: Path) -> None:
    dvc_yaml.write_text("stages:\n  prepare:\n    cmd: x\n")
    with pytest.raises(ConfigError, match="no stage iterate; it has prepare"):
        sync_dependencies(dvc_yaml, ["r.py"])


@pytest.mark.parametrize("files", [["r.py"], ["r.py", "m/one"]])
def test_lists_that_are_not_indented_stay_so(dvc_yaml: Path, files: list[str]) -> None:
    text = DVC.replace("    deps: [comlrl.lock, data/x]  # inputs\n", "    deps:\n    - comlrl.lock\n    - data/x\n")
    dvc_yaml.write_text(text)
    assert sync_dependencies(dvc_yaml, {"prepare": files})
    added = "".join(f"    - {file}  # from params.yaml\n" for file in files)
    assert dvc_yaml.read_text() == text.replace("    - data/x\n", f"    - data/x\n{added}")
    assert sync_dependencies(dvc_yaml, {})
    assert dvc_yaml.read_text() == text
