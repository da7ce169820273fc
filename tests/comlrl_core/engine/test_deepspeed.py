"""DeepSpeed gives the local engine's weights: any ZeRO stage, one process or two, before and after a change of both."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from comlrl_core.config.engine import EngineSettings
from comlrl_core.engine import processes
from comlrl_core.engine.build import build_engine
from comlrl_core.engine.deepspeed import deepspeed_config
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.errors import ConfigError

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
TRAININGS = ("madpo", "magrpo", "reward_model", "maac", "iac", "four")
SCRIPT = Path(__file__).with_name("work.py")
SECONDS = 400


def _load_work() -> Any:
    spec = importlib.util.spec_from_file_location("engine_work", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


work = _load_work()


@pytest.fixture(scope="module")
def local() -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    """Weights and losses of the local engine."""
    torch.set_num_threads(1)
    found = {name: train(EngineSettings()) for name, train in work.TRAININGS.items()}
    starts = {
        "madpo": work.weights_of(a=work.small_model(0), b=work.small_model(1)),
        "magrpo": work.weights_of(shared=work.small_model(2)),
        "reward_model": work.weights_of(reward=work.reward_model(3)),
        "maac": work.weights_of(a=work.small_model(11), b=work.small_model(12)),
        "iac": work.weights_of(a=work.small_model(14), b=work.small_model(15)),
    }
    for training, start in starts.items():
        moved = max(float((found[training][0][name] - value).abs().max()) for name, value in start.items())
        assert moved > 5e-3, training  # or agreement says nothing
    return found | {"bf16": work.train_madpo(EngineSettings(), torch.bfloat16)}


@pytest.fixture(scope="module")
def after_local_states() -> dict[str, dict[str, Tensor]]:
    return {}


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.endurance, id="1-process"), pytest.param(2, id="2-processes")],
)
def sharded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, after_local_states: dict[str, Any]
) -> tuple[Path, dict[str, Tensor]]:
    """What `work.py` left under torchrun, without any compiler at hand and with nothing compiled before."""
    folder = tmp_path_factory.mktemp(f"processes_{request.param}")
    for kind, dtype in work.DTYPES.items():
        after_local_states[kind] = work.leave_state(EngineSettings(), folder / f"local_{kind}", dtype)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    environment["PATH"] = str(folder / "nothing")
    done = subprocess.run(
        [*run, str(SCRIPT), str(folder), *map(str, STAGES)],
        env=environment,
        timeout=SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert not (folder / "extensions").exists()
    return folder, load_file(folder / work.OUT_FILE)


def difference(found: dict[str, Tensor], prefix: str, expected: dict[str, Tensor]) -> float:
    names = {key.removeprefix(f"{prefix}/") for key in found if key.startswith(f"{prefix}/")} - {"losses"}
    assert names == expected.keys()
    return max(float((found[f"{prefix}/{name}"] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("training", TRAININGS)
def test_ten_updates_are_the_local_engines(
    sharded: tuple[Path, dict[str, Tensor]], local: dict[str, Any], training: str, stage: int
) -> None:
    """Learning rate 1e-3 down to 1e-4: weights move by 5.1e-3 to 5.5e-3, and differ by less than 1e-5."""
    weights, losses = local[training]
    assert difference(sharded[1], f"{stage}/{training}", weights) < 1e-5
    torch.testing.assert_close(sharded[1][f"{stage}/{training}/losses"], torch.tensor(losses), atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_losses_are_the_local_engines(
    sharded: tuple[Path, dict[str, Tensor]], local: dict[str, Any], stage: int
) -> None:
    losses = sharded[1][f"{stage}/bf16/losses"]
    torch.testing.assert_close(losses, torch.tensor(local["bf16"][1]), atol=2e-3, rtol=0)
    assert float((losses[0] - losses[-1]).abs()) > 5e-3  # or nothing was learned and everything agrees


@pytest.mark.parametrize("stage", STAGES)
def test_local_states_resume(
    sharded: tuple[Path, dict[str, Tensor]], after_local_states: dict[str, Any], stage: int
) -> None:
    assert difference(sharded[1], f"{stage}/resumed_fp32", after_local_states["fp32"]) < 1e-5
    # bf16 weights of size up to 1 are 2^-8 apart at most, and a near-tie may round either way.
    assert difference(sharded[1], f"{stage}/resumed_bf16", after_local_states["bf16"]) <= 2**-8


@pytest.mark.parametrize("stage", STAGES)
def test_states_resume_at_the_same_and_at_another_stage(sharded: tuple[Path, dict[str, Tensor]], stage: int) -> None:
    for kind, limit in (("fp32", 1e-5), ("bf16", 2**-8)):
        prefix = f"{stage}/left_{kind}/"
        expected = {k.removeprefix(prefix): v for k, v in sharded[1].items() if k.startswith(prefix)}
        for resumed in ("same_stage", "changed_stage") if kind == "fp32" else ("changed_stage",):
            assert difference(sharded[1], f"{stage}/{resumed}_{kind}", expected) <= limit


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine_kind", ["local", "deepspeed"])
def test_states_resume_on_one_process(
    sharded: tuple[Path, dict[str, Tensor]], stage: int, engine_kind: Literal["local", "deepspeed"]
) -> None:
    for kind, dtype in work.DTYPES.items():
        prefix = f"{stage}/left_{kind}/"
        expected = {k.removeprefix(prefix): v for k, v in sharded[1].items() if k.startswith(prefix)}
        engine = EngineSettings() if engine_kind == "local" else work.sharded_engine(stage)
        found = work.resume(engine, sharded[0] / f"stage_{stage}_{kind}", dtype)
        limit = 1e-5 if kind == "fp32" else 2**-8
        assert max(float((found[k] - v).abs().max()) for k, v in expected.items()) <= limit


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_stop_generating_at_different_lengths_hang_each_other(
    sharded: tuple[Path, dict[str, Tensor]], stage: int
) -> None:
    """Pitfall 32: they do not, nor does one without tasks; the answers are those of one process."""
    expected = work.sample(EngineSettings())
    assert sharded[1][f"{stage}/sampled"].tolist() == expected
    ends = [place for place, id_ in enumerate(expected) if id_ == -1]
    lengths = {end - before - 1 for before, end in itertools.pairwise([-1, *ends])}
    assert len(ends) == 16 and len(lengths) > 5


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_optimizers_and_weights_train_alike(
    sharded: tuple[Path, dict[str, Tensor]], local: dict[str, Any], stage: int
) -> None:
    assert difference(sharded[1], f"{stage}/offloaded", local["madpo"][0]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_skipped_or_forgotten_leaves_no_trace(sharded: tuple[Path, dict[str, Tensor]], stage: int) -> None:
    assert bool(sharded[1][f"{stage}/skipping"])


def test_offload_and_further_options_reach_deepspeed() -> None:
    engine = EngineSettings(
        kind="deepspeed",
        zero_stage=3,
        offload_optimizer="cpu",
        offload_parameters="nvme",
        nvme_path="/fast",
        zero_options={"stage3_max_live_parameters": 7},
    )
    config = deepspeed_config(OptimizerSettings(1e-3, gradient_clip=None), engine, low_precision=True)
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "stage3_max_live_parameters": 7,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/fast"},
    }
    assert config["bf16"]["enabled"] and config["gradient_clipping"] == 0.0


def test_the_number_of_processes_must_be_there() -> None:
    assert processes.world_size() == 1
    with pytest.raises(ConfigError, match=r"nproc 3 x num_nodes 1 were asked for, and 1 are here"):
        build_engine(work.small_model(0), OptimizerSettings(1e-3), EngineSettings(kind="deepspeed", nproc=3))


def test_nothing_else_imports_deepspeed() -> None:
    modules = "comlrl_core.trainers.preference, tasks.update, flows.training"
    code = f"import sys, {modules}; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.strip().endswith("False"), done.stderr
