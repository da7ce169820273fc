"""Settings of the REINFORCE family: MAGRPO, MARLOO, MAReMax, MAREINFORCE, as published plus our optional fields."""

from typing import Literal

from pydantic import Field

from comlrl_core.config import fields
from comlrl_core.notices import say_once


class MAGRPOConfig(fields.RolloutTrainingFields):
    """Multi-agent GRPO: the baseline of a joint response is its group's mean."""

    num_generations: int = Field(
        4, ge=2, le=4096, description="Completions of every agent per rollout node; a baseline needs two or more."
    )
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
    advantage_normalization: bool = Field(
        True,
        description="Centre returns and divide by their group's standard deviation, which makes all modes alike.",
    )
    advantage_mode: Literal["mean", "max", "rloo", "raw"] = Field("mean", description="Baseline of a group's returns.")

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        if self.discount != 1.0:
            say_once("tree-discount", f"discount {self.discount} has no effect on rollout trees; see tree_discount")
        self.say_if_stopped_early()
        if self.advantage_normalization and self.advantage_mode != "mean":
            say_once(
                f"normalised-{self.advantage_mode}",
                f"advantage_normalization: true makes advantage_mode: {self.advantage_mode} the same as mean; "
                "set it to false for a baseline of its own",
            )
        if self.joint_mode == "aligned" and self.cross_aggregation != "sum":
            say_once("aligned-aggregation", "cross_aggregation has no effect under joint_mode: aligned")
        branches = self.num_generations ** (1 if self.joint_mode == "aligned" else self.num_agents)
        self.say_if_stale(sum(branches**turn for turn in range(self.num_turns)))
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
