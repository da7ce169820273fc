"""Settings of MARLHF, offline and iterative, as published plus our optional fields."""

from typing import Any, Literal

from pydantic import Field, model_validator

from comlrl_core.algorithms.actor_critic_config import (
    ACTOR_CRITIC_CONFIGS,
    CriticFields,
    HeadFields,
    check_heads,
    say_if_unclipped,
)
from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.algorithms.reinforce_config import REINFORCE_CONFIGS
from comlrl_core.config import fields
from comlrl_core.notices import say_once

# Published fields that have no meaning here: accepted at these values alone.
FIXED_FIELDS: dict[str, Any] = {
    "num_turns": 1,
    "joint_mode": "aligned",
    "discount": 1.0,
    "early_termination_threshold": None,
    "external_prompt_passthrough": False,
    "dpo_beta": 0.1,
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "reference": "none",
    "environment_steps_per_pair": 2,
}
# Those of a critic: a backend without one accepts them at these values alone.
CRITIC_FIELDS: dict[str, Any] = {
    name: None if name == "critic_learning_rate" else field.default
    for kind in (CriticFields, HeadFields)
    for name, field in kind.model_fields.items()
}


class MARLHFFields(HeadFields, CriticFields):
    """The reward model, and the reward-based backend that it teaches."""

    rl_algorithm: Literal["magrpo", "mareinforce", "marloo", "maremax", "maac", "iac"] = Field(
        "magrpo",
        description="What updates the policies with the reward model's scores: the baseline of a group, or a critic of "
        "the team (maac) or of every agent (iac).",
    )
    num_generations: int = Field(
        4,
        ge=1,
        le=4096,
        description="Joint responses per task that the reward model scores for an update; 2 or more without a critic.",
    )
    advantage_normalization: bool = Field(
        True,
        description="Centre scores and divide by their group's standard deviation, which makes all backends alike.",
    )
    advantage_mode: Literal["mean", "max", "rloo", "raw"] = Field(
        "mean", description="Decided by rl_algorithm; the default or that backend's own."
    )
    reference_kl_enabled: bool = Field(
        False, description="Subtract the sampled divergence from the initial policies from every agent's score."
    )
    reward_model_name: str | None = Field(
        None,
        min_length=1,
        description="The reward model's base: a name, a folder, `builtin:tiny`, `builtin:tiny-pretrained`; null = "
        "the first agent's.",
    )
    reward_model_device: str = Field("auto", min_length=1, description="`auto` = the GPU if there is one; or a device.")
    reward_learning_rate: fields.LearningRate = Field(1e-5, description="Learning rate of the reward model.")
    reward_num_train_epochs: int = Field(1, ge=1, description="Passes over the pairs when the reward model is fitted.")
    reward_train_batch_size: int = Field(1, ge=1, description="Pairs in one optimizer step of the reward model.")
    reward_max_length: int | None = Field(
        None,
        ge=4,
        description="Most tokens of a joint text (prompts are cut, answers never); null = the model's context.",
    )
    reward_freeze_backbone: bool = Field(False, description="Fit the reward model's head alone.")
    reward_eval_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="Share of the tasks that the reward model is measured on, never fitted to."
    )
    center_rewards_coef: fields.Coefficient = Field(
        0.0, description="Weight of (score of the winner + score of the loser)^2 in the reward model's loss."
    )
    reward_probe_samples: int = Field(
        64,
        ge=0,
        description="Joint responses that reward model and task reward both score before and after an update, to tell "
        "whether one follows the other; 0 = none.",
    )
    critic_learning_rate: fields.LearningRate | None = Field(  # type: ignore[assignment]
        None, description="Learning rate of the critics; null = agent_learning_rate."
    )

    @model_validator(mode="after")
    def _fixed_fields(self) -> "MARLHFFields":
        for name, allowed in FIXED_FIELDS.items():
            if getattr(self, name) != allowed:
                raise ValueError(f"{name} has no meaning for MARLHF; allowed is {allowed!r} alone")
        if self.needs_critic():
            self._critic_fits()
            return self
        if self.num_generations < 2:
            raise ValueError(f"num_generations must be 2 or more for rl_algorithm: {self.rl_algorithm}, not 1")
        for name, allowed in CRITIC_FIELDS.items():
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"{name} belongs to rl_algorithm: maac or iac, not to {self.rl_algorithm}; allowed is {allowed!r} "
                    "alone"
                )
        if self.advantage_mode not in ("mean", self.baseline()):
            raise ValueError(
                f"advantage_mode: {self.advantage_mode} contradicts rl_algorithm: {self.rl_algorithm}, whose own is "
                f"{self.baseline()}; leave it out"
            )
        return self

    def _critic_fits(self) -> None:
        if self.advantage_mode != "mean":
            raise ValueError(f"advantage_mode has no meaning for rl_algorithm: {self.rl_algorithm}; leave it out")
        if self.rl_algorithm == "maac" and not self.use_separate_critic:
            raise ValueError("use_separate_critic must be true for rl_algorithm: maac: its critic sees all agents")
        check_heads(self.use_separate_critic, self)

    def needs_critic(self) -> bool:
        """Whether a value function is trained beside the agents."""
        return self.rl_algorithm in ACTOR_CRITIC_CONFIGS

    def has_central_critic(self) -> bool:
        """Whether one critic sees all agents."""
        return self.rl_algorithm == "maac"

    def has_separate_critic(self) -> bool:
        """Whether critics have models of their own."""
        return self.use_separate_critic

    def head_hidden_dim(self) -> int | None:
        """Hidden layer of the critics' heads."""
        return self.critic_value_head_hidden_dim if self.use_separate_critic else self.value_head_hidden_dim

    def clip_range(self) -> float | None:
        """How far an update may move a value; None: any distance."""
        return None if self.use_separate_critic else self.value_clip_range

    def baseline(self) -> Literal["mean", "max", "rloo", "raw"]:
        """The `advantage_mode` of a backend without a critic."""
        mode: Literal["mean", "max", "rloo", "raw"] = (
            REINFORCE_CONFIGS[self.rl_algorithm].model_fields["advantage_mode"].default
        )
        return mode

    def fits_reward_model(self) -> bool:
        """Whether pairs teach a reward model, and this the policies."""
        return True


class MARLHFConfig(MARLHFFields, MADPOConfig):
    """Offline MARLHF: one collection, one reward model, then `num_train_epochs` passes over the tasks with it."""

    num_train_epochs: int = Field(20, ge=1, description="Passes over the tasks with the reward model's scores.")

    def critic_rate(self) -> float:
        """Learning rate of the critics."""
        return self.critic_learning_rate or self.agent_learning_rate

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        _say_notices(self)


class MARLHFIterConfig(MARLHFFields, MADPOIterConfig):
    """Iterative MARLHF: collect against the comparator, draw from replay, fit a reward model, update with it."""

    num_train_epochs: int = Field(2, ge=1, description="Passes over the tasks with the reward model's scores.")
    reward_num_train_epochs: int = Field(2, ge=1, description="Passes over the drawn pairs, per iteration.")
    reward_model_init: Literal["base", "previous"] = Field(
        "base", description="What an iteration's reward model starts from: its base, or that of the iteration before."
    )
    preference_scoring_reward: Literal["task", "reward_model"] = Field(
        "task",
        description="Who decides which side of a pair wins: the task reward, or the newest reward model (the task "
        "reward until there is one).",
    )

    def critic_rate(self) -> float:
        """Learning rate of the critics."""
        return self.critic_learning_rate or self.agent_learning_rate

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        _say_notices(self)
        if self.preference_scoring_reward == "reward_model":
            say_once(
                "learned-labels",
                "preference_scoring_reward: reward_model labels pairs with the model that is fitted to them; the task "
                "reward is asked for the first iteration, the probes and the evaluation alone",
            )


def _say_notices(config: MARLHFConfig | MARLHFIterConfig) -> None:
    if config.needs_critic():
        say_if_unclipped(config.use_separate_critic, config.value_clip_range)
    elif config.advantage_normalization and config.rl_algorithm != "magrpo":
        say_once(
            f"normalised-{config.rl_algorithm}",
            f"advantage_normalization: true makes rl_algorithm: {config.rl_algorithm} the same as magrpo; set it to "
            "false for a baseline of its own",
        )
    config.say_if_truncated()
