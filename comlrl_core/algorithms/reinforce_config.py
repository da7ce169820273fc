"""Settings of the REINFORCE family: MAGRPO, MARLOO, MAReMax, MAREINFORCE, as published plus our optional fields."""

from typing import Literal

from pydantic import Field, model_validator

from comlrl_core.config import fields
from comlrl_core.notices import say_once

# Ends every rollout of rewards in [0, 1] after its first turn.
PUBLISHED_THRESHOLD = -0.2


class MAGRPOConfig(
    fields.BufferFields,
    fields.SamplingFields,
    fields.OptimizationFields,
    fields.RunningFields,
):
    """Multi-agent GRPO: the baseline of a joint response is its group's mean."""

    num_generations: int = Field(
        4, ge=2, le=4096, description="Completions of every agent per rollout node; a baseline needs two or more."
    )
    num_turns: int = Field(2, ge=1, le=64, description="Turns of a rollout; above 1 an external_transition is needed.")
    joint_mode: Literal["aligned", "cross"] = Field(
        "aligned",
        description="Joint responses of a node: completions of the same index, or every combination.",
    )
    cross_aggregation: Literal["sum", "mean"] = Field(
        "sum", description="What a completion is credited with under cross: the sum of its combinations, or the mean."
    )
    discount: float = Field(1.0, ge=0.0, le=1.0, description="No effect on rollout trees; see tree_discount.")
    tree_discount: float = Field(
        1.0, ge=0.0, le=1.0, description="Weight of the next turn's mean return in a branch's."
    )
    early_termination_threshold: float | None = Field(
        PUBLISHED_THRESHOLD,
        description="A node whose mean reward is above it has no next turn; null = off (shipped settings: null).",
    )
    external_prompt_passthrough: bool = Field(
        False, description="Use the transition's prompts as they are, without the agents' formatters."
    )
    rollout_buffer_size: int = Field(2, ge=1, description="Rollout nodes that wait for one update.")
    train_batch_size: int | None = Field(
        None, ge=1, description="Rollout nodes in one optimizer step; null = rollout_buffer_size."
    )
    advantage_normalization: bool = Field(
        True,
        description="Centre returns and divide by their group's standard deviation, which makes all modes alike.",
    )
    advantage_mode: Literal["mean", "max", "rloo", "raw"] = Field("mean", description="Baseline of a group's returns.")
    reference_kl_enabled: bool = Field(
        False, description="Subtract the sampled divergence from the initial policies from every agent's return."
    )
    on_bad_reward: Literal["fail", "drop"] = Field(
        "fail", description="Stop at a NaN, infinite or missing reward, or drop and count that joint response."
    )
    collection_batch_size: int | None = Field(
        None, ge=1, description="Tasks rolled out together; null = as many as fill the buffer once."
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="Completions per forward pass of an agent; null = the whole minibatch."
    )
    lr_schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule over the updates of all epochs."
    )

    @model_validator(mode="after")
    def _optimizer_carries(self) -> "MAGRPOConfig":
        if self.optimizer_state != "carry":
            raise ValueError(
                "optimizer_state: reset belongs to iterative algorithms; epochs of reward-based training always carry"
            )
        return self

    def is_iterative(self) -> bool:
        """Whether the run is a chain of collections against a comparator: never here."""
        return False

    def nodes_per_update(self) -> int:
        """Rollout nodes in one optimizer step."""
        return self.train_batch_size or self.rollout_buffer_size

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        if self.discount != 1.0:
            say_once("tree-discount", f"discount {self.discount} has no effect on rollout trees; see tree_discount")
        if self.num_turns > 1 and self.early_termination_threshold == PUBLISHED_THRESHOLD:
            say_once(
                "published-threshold",
                f"early_termination_threshold {PUBLISHED_THRESHOLD} ends every rollout with a mean reward above it, "
                "all rewards in [0, 1] included, after its first turn; null switches it off",
            )
        if self.advantage_normalization and self.advantage_mode != "mean":
            say_once(
                f"normalised-{self.advantage_mode}",
                f"advantage_normalization: true makes advantage_mode: {self.advantage_mode} the same as mean; "
                "set it to false for a baseline of its own",
            )
        if self.joint_mode == "aligned" and self.cross_aggregation != "sum":
            say_once("aligned-aggregation", "cross_aggregation has no effect under joint_mode: aligned")
        if self.collection_batch_size is not None:
            branches = self.num_generations ** (1 if self.joint_mode == "aligned" else self.num_agents)
            nodes = sum(branches**turn for turn in range(self.num_turns))
            enough = -(-self.rollout_buffer_size // nodes)
            if self.collection_batch_size > enough:
                say_once(
                    "stale-samples",
                    f"collection_batch_size {self.collection_batch_size} rolls out more tasks than the {enough} that "
                    "fill the buffer: later updates train on samples of older policies; see train/sample_age",
                )
        self.say_if_truncated()


class MARLOOConfig(MAGRPOConfig):
    """Multi-agent RLOO: the baseline of a joint response is the mean of the others."""

    advantage_mode: Literal["rloo"] = Field("rloo", description="Baseline of a group's returns: the others' mean.")


class MAReMaxConfig(MAGRPOConfig):
    """Multi-agent ReMax: the baseline of a joint response is its group's best."""

    advantage_mode: Literal["max"] = Field("max", description="Baseline of a group's returns: the largest.")


class MAREINFORCEConfig(MAGRPOConfig):
    """Multi-agent REINFORCE: no baseline."""

    advantage_mode: Literal["raw"] = Field("raw", description="No baseline: the returns themselves.")


REINFORCE_CONFIGS: dict[str, type[MAGRPOConfig]] = {
    "magrpo": MAGRPOConfig,
    "marloo": MARLOOConfig,
    "maremax": MAReMaxConfig,
    "mareinforce": MAREINFORCEConfig,
}
