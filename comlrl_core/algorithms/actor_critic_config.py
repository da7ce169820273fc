"""Settings of actor-critic, MAAC and IAC, as published plus our optional fields."""

from typing import Literal, Protocol

from pydantic import Field, model_validator

from comlrl_core.config import fields
from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.lora import LoraSettings
from comlrl_core.notices import say_once

PUBLISHED_CLIP_RANGE = 0.2


class CriticConfig(Protocol):
    """What the critics and the actor-critic loop read of an algorithm's settings."""

    critic_type: Literal["v", "q"]
    value_loss_coef: float
    critic_value_head_hidden_dim: int | None
    critic_max_length: int | None
    q_baseline_samples: int
    critic_model_name: str | None
    critic_devices: str | list[str] | None
    engine: EngineSettings
    lora: LoraSettings | None
    seed: int

    def has_central_critic(self) -> bool: ...

    def has_separate_critic(self) -> bool: ...

    def head_hidden_dim(self) -> int | None: ...

    def clip_range(self) -> float | None: ...

    def critic_rate(self) -> float: ...


class CriticFields(fields.Settings):
    """What every critic has."""

    critic_learning_rate: fields.LearningRate = Field(5e-6, description="Learning rate of the critics.")
    critic_devices: fields.Devices = None
    critic_type: Literal["v", "q"] = Field(
        "v", description="What a critic rates: `v`, a history; `q`, a response to it as well."
    )
    value_loss_coef: fields.Coefficient = Field(0.6, description="Weight of the critics' squared error.")
    critic_model_name: str | None = Field(
        None,
        min_length=1,
        description="The critics' base: a name, a folder, `builtin:tiny`; null = the agents' own.",
    )
    critic_value_head_hidden_dim: int | None = Field(
        None, ge=1, le=1_000_000, description="Hidden layer of the head of a critic with its own model; null = linear."
    )
    critic_max_length: int | None = Field(
        None,
        ge=8,
        description="Most tokens that a critic with its own model reads (prompts are cut first); null = its context.",
    )
    q_baseline_samples: int = Field(
        4,
        ge=1,
        le=4096,
        description="Responses sampled for the baseline of `critic_type: q` where a node has one candidate.",
    )


class HeadFields(fields.Settings):
    """What a critic has that may be a head on its actor's backbone."""

    value_clip_range: float | None = Field(
        PUBLISHED_CLIP_RANGE,
        gt=0.0,
        le=1e6,
        description="How far an update may move a value of a head on the actor's backbone; null = any distance.",
    )
    use_separate_critic: bool = Field(
        True, description="A model per critic; false: a value head on every actor's backbone."
    )
    value_head_hidden_dim: int | None = Field(
        None, ge=1, le=1_000_000, description="Hidden layer of a value head on an actor's backbone; null = linear."
    )


class MAACConfig(CriticFields, fields.RolloutTrainingFields):
    """Multi-agent actor-critic with one central critic on the joint history."""

    num_train_epochs: int = Field(40, ge=1, description="Passes over the training tasks.")
    logging_steps: int = Field(1, ge=1, description="Environment steps between two logged training metrics.")
    num_generations: int = Field(
        1, ge=1, le=4096, description="Responses of every agent per task; 1 where a rollout has several turns."
    )
    rollout_buffer_size: int = Field(8, ge=1, description="Turns of whole episodes that wait for one update.")
    top_k: int | None = Field(None, ge=1, description="Tokens kept by the sampler; null = all.")
    train_batch_size: int | None = Field(
        None, ge=1, description="Turns in one optimizer step; null = rollout_buffer_size."
    )
    reference_kl_enabled: bool = Field(
        False, description="Subtract the sampled divergence from the initial policies from every agent's advantage."
    )
    advantage_normalization: bool = Field(
        True, description="Centre the advantages of a full buffer, turn by turn, and divide by their deviation."
    )
    discount: float = Field(1.0, ge=0.0, le=1.0, description="Weight of the next turn's value in a target.")

    @model_validator(mode="after")
    def _one_response_per_turn(self) -> "MAACConfig":
        if self.num_turns > 1 and self.num_generations != 1:
            raise ValueError(
                f"num_generations must be 1 with num_turns {self.num_turns}, not {self.num_generations}: episodes of "
                "several turns do not branch"
            )
        return self

    def needs_critic(self) -> bool:
        """Whether a value function is trained beside the agents: always."""
        return True

    def has_central_critic(self) -> bool:
        """Whether one critic sees all agents."""
        return True

    def has_separate_critic(self) -> bool:
        """Whether critics have models of their own."""
        return True

    def head_hidden_dim(self) -> int | None:
        """Hidden layer of the critics' heads."""
        return self.critic_value_head_hidden_dim

    def clip_range(self) -> float | None:
        """How far an update may move a value; None: any distance."""
        return None

    def critic_rate(self) -> float:
        """Learning rate of the critics."""
        return self.critic_learning_rate

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        self.say_if_stopped_early()
        self.say_if_stale(self.num_turns)
        self.say_if_truncated()


class IACConfig(HeadFields, MAACConfig):
    """Independent actor-critic: a critic per agent on that agent's own history."""

    @model_validator(mode="after")
    def _head_fits(self) -> "IACConfig":
        check_heads(self.use_separate_critic, self)
        return self

    def has_central_critic(self) -> bool:
        """Whether one critic sees all agents."""
        return False

    def has_separate_critic(self) -> bool:
        """Whether critics have models of their own."""
        return self.use_separate_critic

    def head_hidden_dim(self) -> int | None:
        """Hidden layer of the critics' heads."""
        return self.critic_value_head_hidden_dim if self.use_separate_critic else self.value_head_hidden_dim

    def clip_range(self) -> float | None:
        """How far an update may move a value; None: any distance."""
        return None if self.use_separate_critic else self.value_clip_range

    def say_notices(self) -> None:
        """Say once what is accepted without effect or differs from what a reader of the settings may expect."""
        super().say_notices()
        say_if_unclipped(self.use_separate_critic, self.value_clip_range)


def check_heads(separate: bool, settings: fields.Settings) -> None:
    """Refuse settings of a kind of critic that there is not. Raises `ValueError` naming both settings."""
    absent = ("value_head_hidden_dim",) if separate else (
        "critic_model_name", "critic_devices", "critic_value_head_hidden_dim", "critic_max_length",
    )  # fmt: skip
    for name in absent:
        if getattr(settings, name) is not None:
            raise ValueError(
                f"{name} belongs to use_separate_critic: {str(not separate).lower()}, and it is "
                f"{str(separate).lower()}; leave one of them out"
            )


def say_if_unclipped(separate: bool, clip_range: float | None) -> None:
    """Say once that a clip range has no effect."""
    if separate and clip_range != PUBLISHED_CLIP_RANGE:
        say_once(
            "unused-clip-range",
            f"value_clip_range {clip_range} has no effect on critics with a model of their own "
            "(use_separate_critic: true)",
        )


ACTOR_CRITIC_CONFIGS: dict[str, type[MAACConfig]] = {"maac": MAACConfig, "iac": IACConfig}
