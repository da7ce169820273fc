"""Groups of published fields that several algorithms share.

Names and defaults are the published ones of CoMLRL 1.4; where a default is kept for compatibility only, the description
says which value the shipped `params.yaml` uses. Fields under "ours" are additions and optional.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from comlrl_core.config.base import Settings
from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.lora import LoraSettings
from comlrl_core.notices import say_once


def _one_for_all(devices: object) -> object:
    """A list of one device means that device for every agent."""
    return devices[0] if isinstance(devices, list | tuple) and len(devices) == 1 else devices


Devices = Annotated[
    str | list[str] | None,
    BeforeValidator(_one_for_all),
    Field(description="A device name (`cpu`, `cuda:0`) for all, or one per agent; null lets the run choose."),
]
Coefficient = Annotated[float, Field(ge=0.0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0.0, le=10.0)]


class SamplingFields(Settings):
    """How responses are sampled."""

    max_new_tokens: int = Field(256, ge=1, le=1_000_000, description="Longest response, in tokens.")
    temperature: float = Field(
        0.6, gt=0.0, le=100.0, description="Softmax temperature of sampling (shipped settings: 1.0)."
    )
    top_p: float = Field(
        0.6,
        gt=0.0,
        le=1.0,
        description="Nucleus mass kept by the sampler; 1.0 = off (shipped settings: 1.0).",
    )
    top_k: int | None = Field(50, ge=1, description="Tokens kept by the sampler; null = all (shipped settings: null).")

    def say_if_truncated(self) -> None:
        """Say once that the sampler draws from fewer tokens than log-probabilities are scored on."""
        if self.top_p < 1.0 or self.top_k is not None:
            say_once(
                "truncated-sampler",
                f"top_p {self.top_p} and top_k {self.top_k} truncate the sampler; log-probabilities are scored on the "
                "full vocabulary. Set top_p: 1.0 and top_k: null to train on what is sampled",
            )


class RunningFields(Settings):
    """Team size, passes over the data, evaluation and devices."""

    num_agents: int = Field(2, ge=1, le=1024, description="Number of agents that answer together.")
    num_train_epochs: int = Field(20, ge=1, description="Passes over the training pairs or tasks.")
    agent_learning_rate: LearningRate = Field(5e-6, description="Learning rate of every agent.")
    logging_steps: int = Field(50, ge=1, description="Environment steps between two logged training metrics.")
    eval_interval: int = Field(
        16,
        ge=0,
        description="Python trainers: evaluate at batch indices divisible by this, the first included; 0 = never. "
        "A project's runs evaluate after every iteration (section `evaluation`).",
    )
    eval_num_samples: int = Field(4, ge=1, description="Python trainers: evaluation tasks used at such a point.")
    eval_batch_size: int = Field(1, ge=1, description="Python trainers: evaluation tasks answered together.")
    parallel_training: Literal["none", "mp"] = Field(
        "none", description="`mp`: each agent on its own device of `agent_devices`."
    )
    agent_devices: Devices = None
    reference_kl_enabled: bool = Field(
        False, description="Penalise the distance to the initial policies (no effect on MADPO's loss)."
    )
    reference_kl_coef: Coefficient = Field(0.1, description="Weight of that penalty.")
    reference_devices: Devices = None

    def needs_critic(self) -> bool:
        """Whether a value function is trained beside the agents."""
        return False

    def has_central_critic(self) -> bool:
        """Whether one critic sees all agents."""
        return False

    @model_validator(mode="after")
    def _devices_fit(self) -> "RunningFields":
        if self.parallel_training == "mp" and not self.agent_devices:
            raise ValueError("parallel_training: mp needs agent_devices (one device name per agent)")
        if "num_agents" in self.model_fields_set:  # else the list of agents may still say how many there are
            self._counts_fit()
        return self

    def _counts_fit(self) -> None:
        """What is given per agent is given as often as there are agents."""
        for name in ("agent_devices", "reference_devices", "comparator_devices"):
            given = getattr(self, name, None)
            if isinstance(given, list) and len(given) != self.num_agents:
                raise ValueError(
                    f"{name} names {len(given)} devices for num_agents: {self.num_agents}; give one, or one per agent"
                )
        given = getattr(self, "critic_devices", None)
        if isinstance(given, list) and (self.has_central_critic() or len(given) != self.num_agents):
            critics = 1 if self.has_central_critic() else self.num_agents
            raise ValueError(f"critic_devices names {len(given)} devices for {critics} critics; give one, or one each")


class OptimizationFields(Settings):
    """Ours: seed, threads, optimizer and batching; none of them is in the published interface."""

    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random stream of the run.")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="PyTorch threads (results depend on it); null = PyTorch's own choice.",
    )
    gradient_clip: float | None = Field(
        1.0, gt=0.0, description="Largest gradient norm of an agent; null = no clipping."
    )
    weight_decay: float = Field(0.0, ge=0.0, lt=1.0, description="AdamW weight decay.")
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0, description="AdamW first-moment decay.")
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0, description="AdamW second-moment decay.")
    adam_epsilon: float = Field(1e-8, gt=0.0, le=1.0, description="AdamW denominator floor.")
    lr_schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule over the updates of one iteration."
    )
    lr_warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up at the start of the schedule.")
    optimizer_state: Literal["carry", "reset"] = Field(
        "carry", description="Keep AdamW's moments from one iteration to the next, or start afresh."
    )
    collection_batch_size: int | None = Field(
        None, ge=1, description="Tasks answered together in a collection; null = all tasks."
    )
    tokens_per_batch: int | None = Field(
        None,
        ge=1,
        description="Upper bound of tokens (rows x length) in one generation batch; null = 32,768.",
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="Pairs per forward pass inside an update; null = the whole minibatch."
    )
    on_nonfinite_loss: Literal["fail", "skip"] = Field(
        "fail",
        description="Stop at a NaN or infinite loss, or skip and count that update (three in a row stop).",
    )
    lora: SkipJsonSchema[LoraSettings | None] = Field(
        None, description="Python trainers' adapters in place of whole models; in `params.yaml`, `team.lora`."
    )
    engine: SkipJsonSchema[EngineSettings] = Field(
        default_factory=EngineSettings, description="Python trainers' engine; in `params.yaml`, the section `engine`."
    )

    @model_validator(mode="after")
    def _adapters_fit(self) -> "OptimizationFields":
        if self.lora is not None and self.engine.kind == "deepspeed" and self.engine.zero_stage == 3:
            raise ValueError("lora goes with zero_stage 0, 1 or 2: an adapter is small, and its base is not trained")
        devices = getattr(self, "agent_devices", None)
        if self.lora is not None and self.lora.share_base and isinstance(devices, list) and len(set(devices)) > 1:
            raise ValueError("agent_devices names several devices, and lora.share_base keeps one base on one of them")
        if devices and devices != "cpu" and self.engine.is_launched():
            raise ValueError("agent_devices goes with one process; of several, each has the GPU of its own number")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "OptimizationFields":
        if self.lr_warmup_steps and self.lr_schedule == "constant":
            raise ValueError("lr_warmup_steps must be 0 with lr_schedule: constant; constant_with_warmup warms up")
        return self


class BufferFields(Settings):
    """What waits for an update, and what one optimizer step takes of it."""

    rollout_buffer_size: int = Field(2, ge=1, description="Samples (pairs) that wait for one update.")
    train_batch_size: int | None = Field(
        None, ge=1, description="Samples (pairs) in one optimizer step; null = rollout_buffer_size."
    )

    @model_validator(mode="after")
    def _batch_fits(self) -> "BufferFields":
        if self.train_batch_size is not None and self.train_batch_size > self.rollout_buffer_size:
            raise ValueError(
                f"train_batch_size {self.train_batch_size} is above rollout_buffer_size {self.rollout_buffer_size}; "
                "an update takes its minibatch from the buffer"
            )
        return self


# Ends every rollout of rewards in [0, 1] after its first turn.
PUBLISHED_THRESHOLD = -0.2


class RolloutTrainingFields(BufferFields, SamplingFields, OptimizationFields, RunningFields):
    """What all algorithms share that learn from the rewards of their own rollouts."""

    num_turns: int = Field(2, ge=1, le=64, description="Turns of a rollout; above 1 an external_transition is needed.")
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
    def _optimizer_carries(self) -> "RolloutTrainingFields":
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

    def say_if_stopped_early(self) -> None:
        """Say once what the published threshold does to rewards in [0, 1]."""
        if self.num_turns > 1 and self.early_termination_threshold == PUBLISHED_THRESHOLD:
            say_once(
                "published-threshold",
                f"early_termination_threshold {PUBLISHED_THRESHOLD} ends every rollout with a mean reward above it, "
                "all rewards in [0, 1] included, after its first turn; null switches it off",
            )

    def say_if_stale(self, nodes_per_task: int) -> None:
        """Say once that more is collected than one update takes."""
        if self.collection_batch_size is None:
            return
        enough = -(-self.rollout_buffer_size // nodes_per_task)
        if self.collection_batch_size > enough:
            say_once(
                "stale-samples",
                f"collection_batch_size {self.collection_batch_size} rolls out more tasks than the {enough} that "
                "fill the buffer: later updates train on samples of older policies; see train/sample_age",
            )


class RolloutFields(BufferFields):
    """The rollout fields that preference algorithms accept at their defaults alone."""

    num_turns: int = Field(1, description="Turns of a task; preference algorithms train on one.")
    joint_mode: str = Field("aligned", description="How responses form joint responses; `aligned` alone here.")
    discount: float = Field(1.0, description="Not used by preference algorithms.")
    early_termination_threshold: float | None = Field(None, description="Not used by preference algorithms.")
    external_prompt_passthrough: bool = Field(False, description="Not used by preference algorithms.")
    advantage_normalization: bool = Field(True, description="Not used by MADPO.")
    advantage_mode: str = Field("mean", description="Not used by MADPO.")

    def pairs_per_update(self) -> int:
        """Pairs in one optimizer step."""
        return self.train_batch_size or self.rollout_buffer_size


class PreferenceFields(Settings):
    """How candidates become pairs, and how pairs are counted."""

    preference_num_candidates: int = Field(80, ge=2, description="Joint responses per task and side.")
    preference_pairs_per_sample: int | None = Field(
        16, ge=1, description="Most pairs kept per task; null = all (and null it must be for `all`)."
    )
    pair_selection: Literal["reward_gap", "all", "random"] = Field(
        "reward_gap", description="Which pairs are kept first."
    )
    min_reward_gap: float = Field(0.0, ge=0.0, description="Pairs whose rewards differ by less are dropped.")
    on_bad_reward: Literal["fail", "drop"] = Field(
        "fail",
        description="Stop at a NaN, infinite or missing reward, or drop and count that joint response.",
    )
    use_environment_step: bool = Field(True, description="Metrics are drawn over environment steps.")
    environment_steps_per_pair: int = Field(2, ge=1, description="Environment steps counted per trained pair.")
    collaboration_mode: Literal["decentralized", "centralized"] = Field(
        "decentralized",
        description="Every agent writes its own response (one actor for all roles is not offered).",
    )

    @model_validator(mode="after")
    def _selection_fits(self) -> "PreferenceFields":
        if self.pair_selection == "all" and self.preference_pairs_per_sample is not None:
            raise ValueError("preference_pairs_per_sample must be null with pair_selection: all")
        if self.collaboration_mode == "centralized":
            raise ValueError("collaboration_mode: centralized is not offered yet; allowed is decentralized")
        return self


class MADPOFields(Settings):
    """The loss of multi-agent direct preference optimisation."""

    dpo_beta: float = Field(0.1, gt=0.0, le=1e4, description="Inverse temperature of the preference loss.")
    loss_type: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="Preference loss.")
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5, description="Assumed share of wrong labels (sigmoid loss).")
    reference: Literal["none", "initial", "previous"] = Field(
        "none",
        description="Policies whose margins are subtracted: none, the run's first, or this iteration's first.",
    )

    @model_validator(mode="after")
    def _loss_fits(self) -> "MADPOFields":
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing belongs to loss_type: sigmoid, not {self.loss_type}")
        return self


class ReplayFields(Settings):
    """Which iteration files an update learns from."""

    preference_replay_mode: Literal["current", "nearest_k", "all_history", "lambda_decay"] = Field(
        "current", description="Iteration files that are eligible, and their weights."
    )
    preference_replay_k: int | None = Field(None, ge=1, description="Newest non-empty files (`nearest_k`).")
    preference_replay_lambda: float | None = Field(
        None, ge=0.0, le=1.0, description="Weight per age of a file (`lambda_decay`)."
    )
    preference_replay_sample_size: int | None = Field(
        None, ge=1, description="Pairs drawn; null = as many as the newest non-empty file holds."
    )
    preference_replay_dir: str | None = Field(
        None, description="Folder of the iteration files (Python trainers; a project uses `replay/`)."
    )

    @model_validator(mode="after")
    def _replay_fits(self) -> "ReplayFields":
        mode, k = self.preference_replay_mode, self.preference_replay_k
        if mode == "nearest_k" and k is None:
            raise ValueError("preference_replay_mode: nearest_k needs preference_replay_k (1 or more)")
        if mode == "current" and k not in (None, 1):
            raise ValueError(f"preference_replay_k under current may be null or 1, not {k}")
        if mode in ("all_history", "lambda_decay") and k is not None:
            raise ValueError(f"preference_replay_k belongs to nearest_k, not to {mode}")
        if mode == "lambda_decay" and self.preference_replay_lambda is None:
            raise ValueError("preference_replay_mode: lambda_decay needs preference_replay_lambda (0 to 1)")
        if mode in ("nearest_k", "all_history") and self.preference_replay_lambda is not None:
            raise ValueError(f"preference_replay_lambda belongs to lambda_decay, not to {mode}")
        return self


class ComparatorFields(Settings):
    """The other side of each comparison."""

    comparator_policy: Literal["current", "current_copy", "model", "history"] = Field(
        "current", description="Who answers on the other side."
    )
    comparator_generation_mode: Literal["decentralized"] = Field(
        "decentralized", description="One response per role, each from the role's own prompt."
    )
    comparator_centralized_agent_index: int = Field(0, ge=0, description="Not used by decentralized comparators.")
    comparator_model_name: str | None = Field(
        None, description="A name or folder for all roles (`comparator_policy: model`)."
    )
    comparator_agents: list[str] | None = Field(
        None, description="A name or folder per role (`comparator_policy: model`)."
    )
    comparator_devices: Devices = None
    comparator_num_candidates: int | None = Field(
        None, ge=1, description="Joint responses of the comparator per task; null = as many as the team's."
    )
    comparator_history_k: int | None = Field(
        None, ge=1, description="How many iterations back (`comparator_policy: history`); null = 1."
    )
    comparator_api_url: None = Field(None, description="Remote comparators are not offered yet.")
    comparator_api_format: Literal["generic"] = Field("generic", description="Remote comparators are not offered yet.")
    comparator_api_model: None = Field(None, description="Remote comparators are not offered yet.")
    comparator_api_max_n_per_request: None = Field(None, description="Remote comparators are not offered yet.")
    comparator_api_timeout: float = Field(120.0, gt=0, description="Remote comparators are not offered yet.")
    comparator_api_headers: None = Field(None, description="Remote comparators are not offered yet.")
    comparator_api_key_env: None = Field(None, description="Remote comparators are not offered yet.")
    comparator_api_key_header: str = Field("Authorization", description="Remote comparators are not offered yet.")
    comparator_api_key_prefix: str = Field("Bearer", description="Remote comparators are not offered yet.")
    comparator_api_response_field: str = Field("completions", description="Remote comparators are not offered yet.")
    comparator_api_extra_body: None = Field(None, description="Remote comparators are not offered yet.")

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        if values.get("comparator_api_key") is not None:
            raise ValueError(
                "comparator_api_key is refused: a key is never a setting. Put it into an environment variable and "
                "name that variable in comparator_api_key_env"
            )
        if values.get("comparator_policy") == "api":
            raise ValueError(
                "comparator_policy: api is not offered yet; allowed are current, current_copy, model, history"
            )
        return {name: value for name, value in values.items() if name != "comparator_api_key"}

    @model_validator(mode="after")
    def _policy_fits(self) -> "ComparatorFields":
        named = [n for n in ("comparator_model_name", "comparator_agents") if getattr(self, n) is not None]
        if self.comparator_policy == "model" and len(named) != 1:
            raise ValueError("comparator_policy: model needs either comparator_model_name or comparator_agents")
        if self.comparator_policy != "model" and named:
            raise ValueError(f"{named[0]} belongs to comparator_policy: model, not to {self.comparator_policy}")
        if self.comparator_history_k is not None and self.comparator_policy != "history":
            raise ValueError(
                f"comparator_history_k belongs to comparator_policy: history, not to {self.comparator_policy}"
            )
        return self
