"""A user's script with the Python trainers, started by torchrun on two processes: one run, not two."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("several.py")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_trainers_on_two_processes_are_those_on_one(tmp_path: Path) -> None:
    """The same files, weights to 1e-5, each answer scored once, and metrics reported once."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    run(str(SCRIPT), str(one))
    run(*LAUNCHER, str(SCRIPT), str(two), "2")
    for name in ("madpo", "marlhf", "magrpo"):
        left, right = one / name, two / name
        found = {path.relative_to(left) for path in left.rglob("*")}
        assert found == {path.relative_to(right) for path in right.rglob("*")}
        weights = [path for path in found if path.suffix == ".safetensors"]
        assert len(weights) > 6
        for path in weights:
            expected = load_file(left / path)
            for key, value in load_file(right / path).items():
                torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0, msg=f"{path}: {key}")
        for path in (path for path in found if path.match("replay/iteration_*.json")):
            assert (left / path).read_text() == (right / path).read_text() or path.name != "iteration_0001.json"
        counts = [(folder / f"{name}_rank_{rank}.txt") for folder, rank in ((one, 0), (two, 0), (two, 1))]
        single, first, second = (path.read_text().split() for path in counts)
        assert first == single and int(single[0]) and int(single[1])
        assert second == ["0", "0"]
