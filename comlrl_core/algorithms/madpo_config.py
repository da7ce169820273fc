"""Settings of MADPO, offline and iterative, as published plus our optional fields."""

from typing import Any, Literal

from pydantic import Field, model_validator

from comlrl_core.config import fields
from comlrl_core.notices import say_once

# Published fields that have no meaning for preference learning on one turn: accepted at these values alone.
FIXED_FIELDS: dict[str, Any] = {
    "num_turns": 1,
    "joint_mode": "aligned",
    "discount": 1.0,
    "early_termination_threshold": None,
    "external_prompt_passthrough": False,
    "advantage_normalization": True,
    "advantage_mode": "mean",
}


class MADPOConfig(
    fields.MADPOFields,
    fields.PreferenceFields,
    fields.RolloutFields,
    fields.SamplingFields,
    fields.OptimizationFields,
    fields.RunningFields,
):
    """Offline MADPO: one collection of the team's own candidates, then `num_train_epochs` passes over the pairs."""

    @model_validator(mode="after")
    def _fixed_fields(self) -> "MADPOConfig":
        for name, allowed in FIXED_FIELDS.items():
            if getattr(self, name) != allowed:
                raise ValueError(f"{name} has no meaning for MADPO; allowed is {allowed!r} alone")
        return self

    def is_iterative(self) -> bool:
        """Whether pairs are collected against a comparator, iteration after iteration."""
        return False

    def iterations(self) -> int:
        """How many collections the run makes."""
        return 1

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        if self.reference_kl_enabled:
            say_once(
                "madpo-kl",
                "reference_kl_enabled has no effect on MADPO's loss; see `reference` for a reference policy",
            )
        self.say_if_truncated()


class MADPOIterConfig(fields.ReplayFields, fields.ComparatorFields, MADPOConfig):
    """Iterative MADPO: collect against the comparator, draw from replay, update; `num_iterations` times."""

    num_train_epochs: int = Field(1, ge=1, description="Passes over the drawn pairs per iteration.")
    preference_num_candidates: int = Field(20, ge=2, description="Joint responses of the team per task.")
    preference_pairs_per_sample: int | None = Field(
        4, ge=1, description="Most pairs kept per task; null = all (and null it must be for `all`)."
    )
    pair_selection: Literal["comparator_reward", "reward_gap", "all", "random"] = Field(  # type: ignore[assignment]
        "comparator_reward",
        description="Which pairs are kept first: best comparator score, largest gap, all, or a draw.",
    )
    num_iterations: int = Field(6, ge=1, le=9999, description="Iterations of collect, draw and update.")
    log_reward_distribution: bool = Field(
        False,
        description="Log the histogram of collected rewards (the reward function needs `reward_range`).",
    )
    policy_checkpoint_dir: str | None = Field(
        None, description="Folder for every iteration's policies (Python trainers; a project uses `models/`)."
    )

    def _counts_fit(self) -> None:
        super()._counts_fit()
        if self.comparator_agents is not None and len(self.comparator_agents) != self.num_agents:
            raise ValueError(
                f"comparator_agents lists {len(self.comparator_agents)} models for num_agents: {self.num_agents}; "
                "give one per agent, or comparator_model_name for all"
            )

    def is_iterative(self) -> bool:
        return True

    def iterations(self) -> int:
        return self.num_iterations

    def say_notices(self) -> None:
        super().say_notices()
        if self.preference_replay_mode == "current" and (
            self.preference_replay_sample_size is not None or self.preference_replay_lambda is not None
        ):
            say_once(
                "current-replay",
                "preference_replay_sample_size and preference_replay_lambda have no effect under "
                "preference_replay_mode: current (all pairs of the iteration are used)",
            )
