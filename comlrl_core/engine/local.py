"""Training in this process with plain PyTorch."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from comlrl_core.engine.protocol import Engine, OptimizerSettings, StepResult, learning_rate_at
from comlrl_core.engine.state import STATE_FILE, read_state, write_state
from comlrl_core.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

__all__ = ["STATE_FILE", "LocalEngine", "build_engines"]

LOW_PRECISION = (torch.bfloat16, torch.float16)


class LocalEngine:
    """AdamW over the trainable parameters of one model.

    Parameters in bf16 or fp16 get an fp32 master: gradients are accumulated, clipped and applied there, and
    the rounded result is copied back. Otherwise a learning rate below the resolution of the weights would
    move none of them.
    """

    loss_scale = 1.0

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.model: nn.Module = model
        self.settings = settings
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ConfigError(f"{type(model).__name__} has no trainable parameter; nothing can be optimised")
        self._masters = {name: p.detach().float() for name, p in self._parameters.items() if p.dtype in LOW_PRECISION}
        self._optimised: dict[str, Tensor] = {**self._parameters, **self._masters}
        self._optimizer = torch.optim.AdamW(
            list(self._optimised.values()),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        self._step = 0
        self._total_steps: int | None = None

    def begin(self, total_steps: int) -> None:
        """Restarts the learning-rate schedule over `total_steps` steps; the moments stay."""
        self._step = 0
        self._total_steps = total_steps

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to what is accumulated, in fp32 where there is a master."""
        torch.autograd.backward(loss)
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def step(self) -> StepResult:
        """One AdamW step with the accumulated gradient; left out when the gradient's norm is not finite.

        Raises:
            ConfigError: the schedule decays and `begin` was not called.
        """
        if self._total_steps is None and self._decays:
            raise ConfigError(
                f"lr_schedule {self.settings.lr_schedule!r} needs begin(total_steps) before the first step"
            )
        learning_rate = learning_rate_at(self.settings, self._step, self._total_steps or 0)
        limit = self.settings.gradient_clip
        norm = torch.nn.utils.clip_grad_norm_(self._optimised.values(), float("inf") if limit is None else limit)
        skipped = not bool(norm.isfinite())
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            with torch.no_grad():
                for name, master in self._masters.items():
                    self._parameters[name].copy_(master)
            self._step += 1
        self.zero_grad()
        return StepResult(norm.item(), learning_rate, skipped)

    def zero_grad(self) -> None:
        """Forgets the accumulated gradient."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    @property
    def _decays(self) -> bool:
        """Whether the schedule depends on how many steps there will be."""
        return self.settings.lr_schedule in ("linear", "cosine")

    def save_state(self, directory: Path) -> None:
        """Writes moments, fp32 masters and the schedule to `directory/engine.safetensors`.

        Equal states give equal bytes. The file appears whole or not at all. The weights themselves are not in
        it: they belong to the model's checkpoint, which must be saved at the same moment.
        """
        tensors = {f"master/{name}": master for name, master in self._masters.items()}
        for name, tensor in self._optimised.items():
            tensors |= {f"{key}/{name}": value for key, value in self._optimizer.state.get(tensor, {}).items()}
        write_state(directory, tensors, self._step, self._total_steps if self._decays else None)

    def load_state(self, directory: Path) -> None:
        """Restores what `save_state` wrote, bit for bit; the model must already have its saved weights.

        Raises:
            DataError: the file is missing, torn, or belongs to another model or to other weights.
        """
        path = directory / STATE_FILE
        tensors, header = read_state(path)
        state: dict[Tensor, dict[str, Tensor]] = {}
        masters: dict[str, Tensor] = {}
        for entry, value in tensors.items():
            kind, _, name = entry.partition("/")
            target = self._optimised.get(name)
            if target is None or (value.dim() and value.shape != target.shape):
                raise DataError(f"{path}: {entry} {tuple(value.shape)} fits no trainable parameter of this model")
            # Cloned: a tensor inside the mapped file may be unaligned, which changes the last bits of
            # vectorised sums.
            if kind == "master":
                masters[name] = value.to(target.device).clone()
            else:
                state.setdefault(target, {})[kind] = value.to(target.device if value.dim() else "cpu").clone()
        if masters.keys() != self._masters.keys():
            raise DataError(
                f"{path}: its fp32 masters are of other parameters than this model's; was the dtype changed?"
            )
        for name, value in masters.items():
            if not torch.equal(value.to(self._parameters[name].dtype), self._parameters[name]):
                raise DataError(f"{path}: the fp32 master of {name} belongs to other weights than the model's")
        for name, value in masters.items():
            self._masters[name].copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        self._step, self._total_steps = header["step"], header["total_steps"]
        self.zero_grad()


def build_engines(
    models: Sequence[nn.Module],
    settings: OptimizerSettings,
    make: Callable[[nn.Module, OptimizerSettings], Engine] = LocalEngine,
) -> list[Engine]:
    """One engine per agent; agents with the same model object share one engine, hence one optimizer.

    Args:
        models: one per agent, in agent order.
        settings: the same for every engine.
        make: builds the engine of one model.

    Raises:
        ConfigError: two different model objects hold the same trainable parameter: two optimizers would step
        it.
    """
    engines: dict[int, Engine] = {}
    owner: dict[int, int] = {}
    for agent, model in enumerate(models):
        if id(model) in engines:
            continue
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and owner.setdefault(id(parameter), agent) != agent:
                raise ConfigError(
                    f"agents {owner[id(parameter)]} and {agent} have different models with the same trainable"
                    f" parameter {name}; give both agents one model object to share it"
                )
        engines[id(model)] = make(model, settings)
    if len(engines) < len(models):
        shared = [[a for a, m in enumerate(models) if id(m) == key] for key in engines]
        groups = "; ".join(", ".join(map(str, agents)) for agents in shared if len(agents) > 1)
        logger.info("agents that share one model, and one optimizer: %s", groups)
    return [engines[id(model)] for model in models]
