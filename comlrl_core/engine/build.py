"""From settings to engines: the one place that knows which kinds there are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from comlrl_core.config.engine import EngineSettings
from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.local import build_engines as build_each
from comlrl_core.engine.protocol import Engine, OptimizerSettings
from comlrl_core.engine.saving_memory import Autocast, checkpoint_layers

if TYPE_CHECKING:
    from comlrl_core.engine.deepspeed import DeepSpeedEngine


def build_engine(model: nn.Module, settings: OptimizerSettings, engine: EngineSettings | None = None) -> Engine:
    """The engine that trains one model: an agent, a reward model, a critic. None: plain PyTorch.

    Under DeepSpeed every process of the group has to build the same engines in the same order.
    """
    if engine is None:
        return LocalEngine(model, settings)
    if engine.gradient_checkpointing:
        checkpoint_layers(model)
    built = LocalEngine(model, settings) if engine.kind == "local" else _deepspeed(model, settings, engine)
    if engine.precision == "bf16_autocast":
        built.model = Autocast(built.model)
    return built


def _deepspeed(model: nn.Module, settings: OptimizerSettings, engine: EngineSettings) -> "DeepSpeedEngine":
    from comlrl_core.engine.deepspeed import DeepSpeedEngine  # a module of no use, and of seconds, to all others

    return DeepSpeedEngine(model, settings, engine)


def build_engines(
    models: Sequence[nn.Module], settings: OptimizerSettings, engine: EngineSettings | None = None
) -> list[Engine]:
    """One engine per agent; agents with the same model object share one. Errors as for `engine.local.build_engines`."""
    return build_each(models, settings, lambda model, own: build_engine(model, own, engine))
