"""Less memory in the backward pass: activations computed twice, matrix products in bf16."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from comlrl_core.errors import ConfigError


class Autocast(nn.Module):
    """A model whose matrix products are computed in bf16; its weights, and what it returns, keep their precision."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, torch.bfloat16):
            return self.module(*args, **kwargs)


def checkpoint_layers(model: nn.Module) -> None:
    """Let every layer of `model` forget its activations, and compute them again in the backward pass.

    Transformers' own switch works in training mode alone; updates here run in eval mode, without dropout.

    Raises:
        ConfigError: the model has no layers that are made for it.
    """
    layers = [module for module in _modules(model) if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"gradient_checkpointing: {type(model).__name__} has no layers that can be computed twice")
    for layer in layers:
        if "forward" not in vars(layer):  # adapters of several agents share their layers
            layer.forward = _twice(layer.forward, model)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    yield from model.modules()
    base = getattr(model, "base", None)  # of adapters: not a submodule, since it is not theirs to train
    if base is not None and not isinstance(base, nn.Module):
        yield from base.model.modules()


def _twice(forward: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    base = getattr(model, "base", None)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The second time, the adapter of the first time has to be the active one."""
        return nullcontext(), nullcontext() if base is None else _as_now(base)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _as_now(base: Any) -> AbstractContextManager[None]:
    states = [(layer, layer._active_adapter, layer._disable_adapters) for layer in base.layers]

    @contextmanager
    def again() -> Iterator[None]:
        before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in base.layers]
        _set(states)
        try:
            yield
        finally:
            _set(before)

    return again()


def _set(states: list[tuple[Any, Any, Any]]) -> None:
    for layer, adapter, disabled in states:
        layer._active_adapter, layer._disable_adapters = adapter, disabled
