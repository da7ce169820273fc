"""Whole weights of models whose parameters may be spread over the processes (ZeRO 3)."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_whole: set[int] = set()  # models inside a block of `gathered`, which may be called again there
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds only a part of the model's weights."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextmanager
def gathered(*models: nn.Module) -> Iterator[None]:
    """Whole weights in every process while the block runs, which reads them and must not change them.

    Every process has to come here, together; what each does inside is its own affair: no pass through a model waits
    for the others. Models that are whole already are left alone.
    """
    different = {id(model): model for model in models if id(model) not in _whole}
    sharded = [model for model in different.values() if is_sharded(model)]
    if not sharded:
        yield
        return
    import deepspeed

    parameters = [parameter for model in sharded for parameter in model.parameters()]
    with ExitStack() as stack:
        stack.enter_context(deepspeed.zero.GatheredParameters(parameters, modifier_rank=None))
        for model in sharded:
            stack.enter_context(_without_hooks(model))
        inside = {id(model) for model in sharded}
        _whole.update(inside)
        stack.callback(_whole.difference_update, inside)
        yield


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """DeepSpeed's hooks fetch and drop weights layer by layer, waiting for the other processes each time."""
    kept: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name in _HOOKS:
            hooks = getattr(module, name, None)
            if hooks:
                kept.append((module, name, hooks))
                setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)
