"""How models are trained: in this process with plain PyTorch, or by DeepSpeed on one process or several."""

from typing import Any, Literal

from pydantic import Field, model_validator

from comlrl_core.config.base import Settings

# Keys of DeepSpeed's `zero_optimization` section that a setting of ours or the engine itself decides.
_OWN_ZERO_KEYS = ("stage", "offload_optimizer", "offload_param")


class EngineSettings(Settings):
    """The engine behind every trainable model, and the processes that share the work."""

    kind: Literal["local", "deepspeed"] = Field(
        "local", description="`local`: plain PyTorch in one process; `deepspeed`: ZeRO on one process or several."
    )
    zero_stage: int = Field(
        2,
        ge=0,
        le=3,
        description="What DeepSpeed shards over the processes: 0 nothing, 1 optimizer states, 2 gradients too, "
        "3 weights too.",
    )
    num_processes: int = Field(
        1, ge=1, le=4096, description="Processes on this machine; above 1 every training stage runs under torchrun."
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where DeepSpeed keeps optimizer states (ZeRO 1 to 3; nvme: 3 alone)."
    )
    offload_parameters: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where DeepSpeed keeps weights that are not in use (ZeRO 3)."
    )
    nvme_path: str | None = Field(None, description="Folder on a fast disk for what is offloaded to nvme.")
    zero_options: dict[str, Any] = Field(
        default_factory=dict, description="Further keys of DeepSpeed's `zero_optimization` section, passed on."
    )
    precision: Literal["weights", "bf16_autocast"] = Field(
        "weights",
        description="`weights`: compute in the weights' own dtype; `bf16_autocast`: matrix products in bf16 when "
        "training.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, about a third more time."
    )
    num_nodes: int = Field(1, ge=1, le=4096, description="Machines that take part, each with num_processes.")
    rendezvous: str | None = Field(
        None,
        pattern=r"^[^:\s]+:\d+$",
        description="`host:port` where several machines meet (torchrun's c10d rendezvous); the first listens there.",
    )
    hostfile: str | None = Field(
        None, description="A DeepSpeed hostfile: its launcher then starts the processes over ssh instead of torchrun."
    )
    collective_timeout: float = Field(
        1800.0, gt=0, le=1e6, description="Seconds after which a process that waits for the others gives up."
    )
    stage_timeout: float | None = Field(
        None, gt=0, description="Seconds after which a stage's processes are ended; null = never."
    )

    @model_validator(mode="after")
    def _fits(self) -> "EngineSettings":
        if self.kind == "local":
            for name in ("num_processes", "num_nodes"):
                if getattr(self, name) > 1:
                    raise ValueError(f"{name}: {getattr(self, name)} needs kind: deepspeed; kind: local is one process")
            for name in ("offload_optimizer", "offload_parameters"):
                if getattr(self, name) != "none":
                    raise ValueError(f"{name} belongs to kind: deepspeed")
            for name in ("zero_options", "hostfile", "rendezvous"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to kind: deepspeed")
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError("offload_optimizer: nvme needs zero_stage 3")
        if self.offload_parameters != "none" and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        if "nvme" in (self.offload_optimizer, self.offload_parameters) and not self.nvme_path:
            raise ValueError("offloading to nvme needs nvme_path, a folder on that disk")
        for name in _OWN_ZERO_KEYS:
            if name in self.zero_options:
                raise ValueError(f"zero_options may not hold {name!r}; there is a setting of its own for it")
        if self.num_nodes > 1 and not (self.rendezvous or self.hostfile):
            raise ValueError("num_nodes above 1 needs rendezvous (host:port) or hostfile")
        if self.rendezvous and self.hostfile:
            raise ValueError("give either rendezvous (torchrun) or hostfile (DeepSpeed's launcher)")
        return self

    def is_launched(self) -> bool:
        """Whether training stages run in processes of their own, under a launcher."""
        return self.num_processes * self.num_nodes > 1 or self.hostfile is not None

    def identity(self) -> dict[str, Any]:
        """The part that changes what is learned by more than rounding."""
        return {"precision": self.precision} if self.precision != "weights" else {}
