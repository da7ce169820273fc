"""Training by DeepSpeed: ZeRO 0 to 3 over the processes of the group, several engines side by side.

Each process passes its share of a minibatch through its own copy (or share) of the model; `backward` takes a share's
loss so that the shares' losses add up to the minibatch's, and the step is the one that a single process would make.

Only processes that train with it import DeepSpeed. On a CPU its communication library would be compiled at the start,
for a minute or more and with a compiler that may not be there; it speeds up all-reduces inside one machine and nothing
depends on it, so it is left out, and so are DeepSpeed's own compiled optimizers.
"""

import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_core.config.engine import EngineSettings
from comlrl_core.engine import processes
from comlrl_core.engine.local import LOW_PRECISION
from comlrl_core.engine.protocol import OptimizerSettings, StepResult, learning_rate_at
from comlrl_core.engine.state import STATE_FILE, read_state, write_state
from comlrl_core.errors import ConfigError, DataError

MOMENTS = ("exp_avg", "exp_avg_sq")
_NEVER = 10**9  # steps between DeepSpeed's own progress lines


class DeepSpeedEngine:
    """AdamW over the trainable parameters of one model, sharded as `engine.zero_stage` says.

    All processes of the group make the same calls in the same order. `model` is DeepSpeed's wrapper; the model itself
    stays whole for `zero_stage` 0 to 2, and is spread over the processes at 3 (`engine.weights.gathered`).
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, engine: EngineSettings) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ConfigError(f"{type(model).__name__} has no trainable parameter; nothing can be optimised")
        self.settings = settings
        self.stage = engine.zero_stage
        dtypes = {p.dtype for p in self._parameters.values()}
        self._low_precision = bool(dtypes & set(LOW_PRECISION))
        if torch.float16 in dtypes:
            raise ConfigError("kind: deepspeed trains weights in float32 or bfloat16, not in float16: set dtype")
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        # DeepSpeed makes all weights bf16 where some are: a head that was in fp32 keeps its weights as its master.
        self._with_master = {name for name, p in self._parameters.items() if p.dtype in LOW_PRECISION}
        self._optimizer = _AdamW(list(self._parameters.values()), settings, self.stage == 0 and not self._low_precision)
        deepspeed = load_deepspeed(engine.collective_timeout)
        if not engine.hostfile and processes.world_size() != engine.nproc * engine.num_nodes:
            raise ConfigError(
                f"engine: nproc {engine.nproc} x num_nodes {engine.num_nodes} were asked for, and "
                f"{processes.world_size()} are here; start as many with torchrun, or let `comlrl run` do it"
            )
        self._optimizer.idle = True  # some of DeepSpeed's optimizers make a first step to allocate the moments
        self._engine = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            config=deepspeed_config(settings, engine, self._low_precision),
            dist_init_required=False,
        )[0]
        self._optimizer.idle = False
        self.model: nn.Module = self._engine  # to be called; its outputs are the wrapped model's
        self._pending = False
        self._step = 0
        self._total_steps: int | None = None

    def begin(self, total_steps: int) -> None:
        """Restarts the learning-rate schedule over `total_steps` steps; the moments stay."""
        self._step = 0
        self._total_steps = total_steps

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this process's share of the loss; the shares of all processes add up."""
        self._pending = True
        self._engine.backward(loss * self.loss_scale)

    @property
    def loss_scale(self) -> float:
        """DeepSpeed takes the mean over the processes, where the sum is wanted."""
        return float(processes.world_size())

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
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        self._pending = False
        norm = self._optimizer.norm if self._optimizer.clips else self._engine.get_global_grad_norm()
        norm = math.inf if norm is None else float(norm)
        skipped = not math.isfinite(norm) or norm < 0 or bool(getattr(self._engine.optimizer, "overflow", False))
        if not skipped:
            self._step += 1
        return StepResult(math.nan if skipped else norm, learning_rate, skipped)

    def zero_grad(self) -> None:
        """Forgets the accumulated gradient."""
        if self._pending:  # part of it may have been handed to other processes: a step that changes nothing takes it
            self._optimizer.idle = True
            try:
                self._engine.step()
            finally:
                self._optimizer.idle = False
        self._pending = False

    @property
    def _decays(self) -> bool:
        """Whether the schedule depends on how many steps there will be."""
        return self.settings.lr_schedule in ("linear", "cosine")

    # ---- state -------------------------------------------------------------------------------------------------------

    def save_state(self, directory: Path) -> None:
        """Writes whole moments, fp32 masters and the schedule to `directory/engine.safetensors`, by the first process.

        Any engine on any number of processes loads it. All processes have to call this.
        """
        tensors: dict[str, Tensor] = {}
        count = self._steps_made()
        for name, parameter in self._parameters.items():
            kinds = [*(["master"] if name in self._with_master else []), *(MOMENTS if count else ())]
            for kind in kinds:
                tensors[f"{kind}/{name}"] = self._whole(parameter, kind).reshape(self._shapes[name]).cpu().clone()
            if count:
                tensors[f"step/{name}"] = torch.tensor(float(count))
        total = self._total_steps if self._decays else None
        processes.by_first(lambda: write_state(directory, tensors, self._step, total))

    def load_state(self, directory: Path) -> None:
        """Restores what an engine of any kind wrote; the model must already have its saved weights.

        Raises:
            DataError: the file is missing, torn, or belongs to another model.
        """
        path = directory / STATE_FILE
        tensors, header = read_state(path)
        masters: dict[str, Tensor] = {}
        moments: dict[tuple[str, str], Tensor] = {}
        count = 0.0
        for entry, value in tensors.items():
            kind, _, name = entry.partition("/")
            shape = self._shapes.get(name)
            if shape is None or (value.dim() and value.shape != shape):
                raise DataError(f"{path}: {entry} {tuple(value.shape)} fits no trainable parameter of this model")
            if kind == "step":
                count = max(count, value.item())
            elif kind == "master":
                masters[name] = value
            else:
                moments[(kind, name)] = value
        if masters.keys() != self._with_master:
            raise DataError(
                f"{path}: its fp32 masters are of other parameters than this model's; was the dtype changed?"
            )
        with torch.no_grad():
            if count:
                self._make_moments(count)
            for name, value in masters.items():
                self._set_whole(self._parameters[name], "master", value)
            for (kind, name), value in moments.items():
                self._set_whole(self._parameters[name], kind, value)
        self._step, self._total_steps = header["step"], header["total_steps"]
        self._pending = False

    def _steps_made(self) -> int:
        state = self._optimizer.state
        made = [entry["step"] for entry in state.values() if "step" in entry]
        return int(max((float(step) for step in made), default=0.0))

    def _fp32(self, parameter: nn.Parameter) -> Tensor:
        """Stage 0: the tensor that AdamW steps for this parameter."""
        if not self._low_precision:
            return parameter
        optimizer = self._engine.optimizer
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for one, master in zip(low, high, strict=True):
                if one is parameter:
                    return master
        raise AssertionError("every trainable parameter has a master")

    def _whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            stepped = self._fp32(parameter)
            found = stepped if kind == "master" else self._optimizer.state[stepped][kind]
        elif kind == "master":
            found = safe_get_full_fp32_param(parameter)
        else:
            found = safe_get_full_optimizer_state(parameter, kind)
        return found.detach()

    def _set_whole(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.float()
        if self.stage == 0:
            stepped = self._fp32(parameter)
            target = stepped if kind == "master" else self._optimizer.state[stepped][kind]
            target.copy_(value)
            return
        set_weights, set_moment = safe_set_full_fp32_param, safe_set_full_optimizer_state
        if self.stage == 3:  # the function for whole tensors takes no size that the processes cannot share evenly
            set_weights, set_moment = safe_set_local_fp32_param, safe_set_local_optimizer_state
            size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            flat = torch.zeros(size * processes.world_size())
            flat[: value.numel()] = value.flatten()
            value = flat[size * processes.rank() : size * (processes.rank() + 1)]
        if kind == "master":
            set_weights(parameter, value)
        else:
            set_moment(parameter, value, kind)

    def _make_moments(self, count: float) -> None:
        """Moments to be filled, as AdamW's first step would make them."""
        for tensor in self._stepped():
            self._optimizer.state[tensor] = {
                "step": torch.tensor(count),
                **{kind: torch.zeros_like(tensor.data) for kind in MOMENTS},
            }
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    def _stepped(self) -> list[Tensor]:
        """The tensors that AdamW steps in this process."""
        if self.stage == 0:
            return [self._fp32(parameter) for parameter in self._parameters.values()]
        if self.stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return list(self._engine.optimizer.single_partition_of_fp32_groups)


class _AdamW(torch.optim.AdamW):
    """AdamW that can be idle for a step, and where nobody else clips, clips and looks for non-finite norms itself."""

    def __init__(self, parameters: list[nn.Parameter], settings: OptimizerSettings, clips: bool) -> None:
        super().__init__(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        self.clips = clips
        self.limit = settings.gradient_clip
        self.idle = False
        self.norm = math.nan

    def step(self, closure: Any = None) -> Any:
        if self.idle:
            return None
        if self.clips:
            parameters = [p for group in self.param_groups for p in group["params"]]
            limit = math.inf if self.limit is None else self.limit
            self.norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
            if not math.isfinite(self.norm):
                return None
        return super().step(closure)


def deepspeed_config(settings: OptimizerSettings, engine: EngineSettings, low_precision: bool) -> dict[str, Any]:
    """What DeepSpeed is told about one model.

    Its counting of micro-batches is switched off: a step takes whatever `backward` has added up since the last one.
    """
    own_clipping = engine.zero_stage == 0 and not low_precision
    zero: dict[str, Any] = {"stage": engine.zero_stage, "overlap_comm": False, **engine.zero_options}
    for key, place in (("offload_optimizer", engine.offload_optimizer), ("offload_param", engine.offload_parameters)):
        if place != "none":
            zero[key] = {"device": place} | ({"nvme_path": engine.nvme_path} if place == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if own_clipping else settings.gradient_clip or 0.0,
        "bf16": {"enabled": low_precision, "check_grad_overflow": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }


def load_deepspeed(timeout: float = processes.DEFAULT_TIMEOUT) -> Any:
    """The DeepSpeed package, ready in this process's group.

    Raises:
        ConfigError: it is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    processes.join(timeout)
    for name, value in (("RANK", processes.rank()), ("WORLD_SIZE", processes.world_size()), ("LOCAL_RANK", 0)):
        os.environ.setdefault(name, str(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional features
        try:
            import deepspeed
            import deepspeed.ops
        except ImportError as error:
            raise ConfigError(f"engine.kind: deepspeed needs the deepspeed package ({error})") from error
    # It calls collectives by names that PyTorch has renamed; once for each call, that is a page a minute.
    warnings.filterwarnings("ignore", message=r".?torch\.distributed\.\w+.? is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # what it warns of, the step's result says
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
