"""All settings of one training run: what `params.yaml` holds and what the Prefect form asks for."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from comlrl_core.algorithms.actor_critic_config import (
    ACTOR_CRITIC_CONFIGS,
    CriticFields,
    HeadFields,
    IACConfig,
    MAACConfig,
)
from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFFields, MARLHFIterConfig
from comlrl_core.algorithms.reinforce_config import (
    REINFORCE_CONFIGS,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLOOConfig,
)
from comlrl_core.config.base import Settings
from comlrl_core.config.engine import EngineSettings
from comlrl_core.config.fields import ComparatorFields, RolloutTrainingFields
from comlrl_core.config.lora import LoraSettings

Preferences = MARLHFIterConfig | MARLHFConfig | MADPOIterConfig | MADPOConfig
Rewards = MAGRPOConfig | MARLOOConfig | MAReMaxConfig | MAREINFORCEConfig | IACConfig | MAACConfig
Training = Preferences | Rewards
TRAINING_CONFIGS: dict[str, type[Training]] = {
    "madpo": MADPOConfig,
    "madpo_iter": MADPOIterConfig,
    "marlhf": MARLHFConfig,
    "marlhf_iter": MARLHFIterConfig,
    **REINFORCE_CONFIGS,
    **ACTOR_CRITIC_CONFIGS,
}
OFFLINE = ("madpo", "marlhf")
FROM_REWARDS = (*REINFORCE_CONFIGS, *ACTOR_CRITIC_CONFIGS)
# What the number of iterations is called among the training settings, where it has a name there.
LENGTHS = ("num_iterations", "num_train_epochs")
INITIAL_ITERATION = "0000"


def iteration_key(iteration: int) -> str:
    """The name of an iteration in files, folders and DVC stages: `0001`."""
    return f"{iteration:04d}"


class TeamSettings(Settings):
    """Who answers: models, prompts and how they are loaded."""

    agent_model: str | None = Field(
        "builtin:tiny",
        description="One model for all agents: `builtin:tiny`, a Hugging Face name or a local folder.",
    )
    agents: list[str] | None = Field(
        None, description="One model per agent instead (names or folders); sets the number of agents."
    )
    templates: str | list[str] | None = Field(
        None,
        description="Prompt text with {field} placeholders of the task row, one for all agents or one per agent.",
    )
    system_prompts: str | list[str] | None = Field(
        None,
        description="System message, one for all or one per agent (needs a tokenizer with a chat template).",
    )
    formatter: str | None = Field(
        None, description="Import path of a Python formatter, `module:function` or `file.py:function`."
    )
    on_long_prompt: Literal["fail", "truncate_left"] = Field(
        "fail",
        description="Refuse a prompt that does not fit the context, or cut it from the left and count it.",
    )
    model_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to the model loader: dtype, attn_implementation, special_tokens, ...",
    )

    lora: LoraSettings | None = Field(
        None, description="Agents as low-rank adapters on one base; null = each agent is a whole model."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "TeamSettings":
        if (self.agent_model is None) == (self.agents is None):
            raise ValueError("give either agent_model (one for all) or agents (one per agent), the other null")
        if self.formatter and (self.templates or self.system_prompts):
            raise ValueError("formatter replaces templates and system_prompts; give one or the other")
        return self


class TaskSettings(Settings):
    """What is answered: training tasks and held-out tasks."""

    train: str = Field(
        "builtin:length_ratio",
        description="`builtin:length_ratio`, `builtin:writing_prompts`, a JSONL/CSV/Parquet file or a data-set name.",
    )
    eval: str | None = Field(
        "builtin:length_ratio",
        description="Held-out tasks, like `train`; a built-in set never shares a task between the two. null = none.",
    )
    num_train: int | None = Field(48, ge=1, description="Training tasks used; null = all of a file.")
    num_eval: int | None = Field(48, ge=1, description="Held-out tasks used; null = all of a file.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the built-in task generators.")
    transition: str | None = Field(
        None,
        description="What happens between turns (rollouts of several turns): `builtin:length_ratio`, "
        "`package.module:function` or `my_tasks.py:function`.",
    )


class RewardSettings(Settings):
    """The oracle that scores joint answers."""

    function: str = Field(
        "builtin:length_ratio",
        description="`builtin:length_ratio`, `package.module:function` or `my_rewards.py:function`.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments bound to the function.")
    processor: str | None = Field(
        None, description="Import path of a function applied to every reward (scaling, clipping)."
    )


class EvaluationSettings(Settings):
    """Sampling from the current policies on the held-out tasks; never changes a weight."""

    samples_per_task: int = Field(4, ge=1, description="Joint answers per held-out task.")
    greedy: bool = Field(False, description="Answer greedily (one sample says all) instead of sampling.")
    batch_size: int | None = Field(None, ge=1, description="Held-out tasks answered together; null = all.")
    confidence: float = Field(0.95, gt=0.5, lt=1.0, description="Level of the intervals around win rates.")

    @model_validator(mode="after")
    def _greedy_once(self) -> "EvaluationSettings":
        if self.greedy and self.samples_per_task != 1:
            raise ValueError("greedy answers are all alike: samples_per_task must be 1 with greedy: true")
        return self


class TrackingSettings(Settings):
    """What MLflow records."""

    enabled: bool = Field(True, description="Record the run in MLflow.")
    experiment: str = Field("comlrl", min_length=1, max_length=200, description="Name of the MLflow experiment.")
    log_policies: bool = Field(True, description="Record the last iteration's policies as an MLflow model.")


class RunConfig(Settings):
    """One training run, whichever door it comes through."""

    form_of: ClassVar[type[Settings]] = MADPOIterConfig  # whose training settings a form asks for

    algorithm: Literal[
        "madpo_iter", "madpo", "marlhf_iter", "marlhf",
        "magrpo", "marloo", "maremax", "mareinforce", "maac", "iac",
    ] = Field(
        "madpo_iter",
        description="From preferences: madpo_iter, marlhf_iter (through a reward model), madpo, marlhf (offline). "
        "From rewards: magrpo, marloo, maremax, mareinforce, and with critics maac, iac.",
    )  # fmt: skip
    num_iterations: int = Field(
        6,
        ge=1,
        le=9999,
        description="Iterations of collect, draw and update; for algorithms that learn from rewards: passes over the "
        "tasks; 1 for the offline algorithm.",
    )
    team: TeamSettings = Field(default_factory=TeamSettings, description="Who answers.")
    tasks: TaskSettings = Field(default_factory=TaskSettings, description="What is answered.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="Who scores the answers.")
    engine: EngineSettings = Field(
        default_factory=EngineSettings, description="How models are trained, and on how many processes."
    )
    training: Training = Field(
        default_factory=dict,
        validate_default=True,
        description="How the team learns (the published settings).",
    )
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="How progress is measured.")
    tracking: TrackingSettings = Field(default_factory=TrackingSettings, description="What MLflow records.")

    @model_validator(mode="before")
    @classmethod
    def _one_collection_offline(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("algorithm") in OFFLINE and "num_iterations" not in values:
            return {**values, "num_iterations": 1}
        return values

    @field_validator("training", mode="before")
    @classmethod
    def _training_of_the_algorithm(cls, training: Any, info: ValidationInfo) -> Any:
        """Read `training` as the settings of the chosen algorithm, so that errors name that algorithm's fields."""
        model = TRAINING_CONFIGS.get(info.data.get("algorithm", ""))
        count = info.data.get("num_iterations")
        if model is None or count is None:
            return model_free(training)
        if isinstance(training, Settings):
            training = training.model_dump(exclude_unset=True)
        if not isinstance(training, Mapping):
            raise ValueError("a mapping of training settings is needed")
        training = _without_unused_fields(dict(training), model, cls.form_of)
        engine = info.data.get("engine") or EngineSettings()
        if EngineSettings.model_validate(training.setdefault("engine", engine)) not in (engine, EngineSettings()):
            raise ValueError("the engine is set at the top level (engine: ...), not among the training settings")
        training["engine"] = engine
        team = info.data.get("team") or TeamSettings()
        if training.get("lora") is not None and LoraSettings.model_validate(training["lora"]) != team.lora:
            raise ValueError("adapters are set in the section team (team.lora), not among the training settings")
        training["lora"] = team.lora
        if info.data["algorithm"] in OFFLINE:
            if count != 1:
                raise ValueError(
                    f"num_iterations must be 1 for the offline algorithm {info.data['algorithm']}, not {count}"
                )
            return model.model_validate(training)
        name = length_field(model)
        if training.setdefault(name, count) != count:
            raise ValueError(
                f"{name} {training[name]} here differs from the top level's num_iterations {count}; "
                "set the top level's alone"
            )
        return model.model_validate(training)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A form asks for one algorithm's training settings, which include those of its siblings.

        One schema instead of a choice of several lets the check of a form name the field at fault.
        """
        schema = handler.resolve_ref_schema(handler(core_schema))
        training = schema["properties"]["training"]
        choices = training.pop("anyOf")
        kinds = [kind.__name__ for kind in get_args(Training)]
        name = cls.form_of.__name__
        form = choices[kinds.index(name)] if name in kinds else handler(cls.form_of.__pydantic_core_schema__)
        schema["properties"]["training"] = {**training, **form}
        return schema

    @model_validator(mode="after")
    def _counts_agree(self) -> "RunConfig":
        agents, training = self.team.agents, self.training
        if "num_agents" not in training.model_fields_set:
            # Assigned even where it is the default: now what is given per agent is checked against it.
            training.num_agents = training.num_agents if agents is None else len(agents)
        elif agents is not None and len(agents) != training.num_agents:
            raise ValueError(f"team.agents lists {len(agents)} models but training.num_agents is {training.num_agents}")
        for name in ("templates", "system_prompts"):
            given = getattr(self.team, name)
            if isinstance(given, list) and len(given) != training.num_agents:
                raise ValueError(
                    f"team.{name} has {len(given)} texts for {training.num_agents} agents; give one, or one per agent"
                )
        return self

    @model_validator(mode="after")
    def _turns_have_a_transition(self) -> "RunConfig":
        if self.training.num_turns > 1 and self.tasks.transition is None:
            raise ValueError(
                f"training.num_turns {self.training.num_turns} needs tasks.transition, a function between turns"
            )
        return self

    def learns_from_rewards(self) -> bool:
        """Whether policies learn from the rewards of their rollouts, without preference pairs."""
        return isinstance(self.training, RolloutTrainingFields)

    def needs_critic(self) -> bool:
        """Whether a value function is trained beside the agents."""
        return self.training.needs_critic()

    def critics(self) -> MAACConfig | MARLHFConfig | MARLHFIterConfig:
        """The training settings of an algorithm with critics."""
        training = self.training
        assert isinstance(training, MAACConfig | MARLHFConfig | MARLHFIterConfig), f"{self.algorithm} has no critics"
        return training

    def fits_reward_model(self) -> bool:
        """Whether pairs teach a reward model, and this the policies."""
        return isinstance(self.training, MARLHFFields)

    def further_models(self) -> list[str]:
        """The models that training reads beside the team: comparators, the bases of reward model and critics."""
        training = self.training
        found: list[str | None] = []
        if isinstance(training, ComparatorFields):
            found += [training.comparator_model_name, *(training.comparator_agents or [])]
        if isinstance(training, MARLHFFields):
            found.append(training.reward_model_name)
        if isinstance(training, CriticFields):
            found.append(training.critic_model_name)
        return [name for name in found if name]

    def values(self) -> dict[str, Any]:
        """Every setting as plain data, ready for YAML, JSON or a form (`num_iterations` once, at the top)."""
        values = self.model_dump(mode="json")
        for name in ("engine", "lora"):  # set elsewhere
            values["training"].pop(name)
        if self.algorithm not in OFFLINE:
            values["training"].pop(length_field(type(self.training)))
        return values


class PreferenceRun(RunConfig):
    """A run that learns from preferences."""

    form_of: ClassVar[type[Settings]] = MARLHFIterConfig

    algorithm: Literal["madpo_iter", "madpo", "marlhf_iter", "marlhf"] = Field(
        "madpo_iter",
        description="Directly from pairs (madpo_iter, offline madpo) or through a reward model (marlhf_iter, marlhf).",
    )


class RewardForm(HeadFields, CriticFields, MAGRPOConfig):
    """The training settings of all algorithms that learn from rewards, as a form asks for them.

    A setting at its default here is left out where the chosen algorithm has no such setting.
    """

    num_generations: int = Field(
        4,
        ge=1,
        le=4096,
        description="Completions of every agent per rollout node; 1 for maac and iac of several turns.",
    )
    discount: float = Field(1.0, ge=0.0, le=1.0, description="Weight of the next turn's value (maac, iac).")


class RewardRun(RunConfig):
    """A run that learns from the rewards of its rollouts."""

    form_of: ClassVar[type[Settings]] = RewardForm

    algorithm: Literal["magrpo", "marloo", "maremax", "mareinforce", "maac", "iac"] = Field(
        "magrpo",
        description="The baseline of a rollout's returns: group mean, mean of the others, group maximum, none; or what "
        "a critic says: of the team (maac), of every agent (iac).",
    )


def length_field(model: type[Settings]) -> str:
    """The training setting that counts iterations: `num_iterations`, or `num_train_epochs` where there is no such."""
    return next(name for name in LENGTHS if name in model.model_fields)


def _without_unused_fields(training: dict[str, Any], model: type[Settings], form: type[Settings]) -> dict[str, Any]:
    """Leave out what a form sends at its default although this algorithm has no such setting, or no choice of it."""
    fields = form.model_fields

    def is_unused(name: str, value: Any) -> bool:
        if name not in fields or value != fields[name].get_default(call_default_factory=True):
            return False
        return name not in model.model_fields or len(get_args(model.model_fields[name].annotation)) == 1

    return {name: value for name, value in training.items() if not is_unused(name, value)}


def model_free(training: Any) -> Any:
    """Training settings that cannot be read yet, because the algorithm itself was refused."""
    return MADPOIterConfig() if isinstance(training, Mapping) else training


class ParamsFile(RunConfig):
    """`params.yaml`: a run, and the chain of its iterations spelt out for DVC."""

    last_iteration: str | None = Field(None, pattern=r"^\d{4}$", description="Name of the last iteration.")
    iterations: dict[str, dict[str, str]] | None = Field(
        None, description="Iteration name -> {previous: name of the iteration before}; empty where `epochs` is used."
    )
    epochs: dict[str, dict[str, str]] | None = Field(
        None, description="The same for algorithms that learn from rewards; empty where `iterations` is used."
    )

    @model_validator(mode="after")
    def _chain_is_whole(self) -> "ParamsFile":
        if self.iterations is None and self.epochs is None and self.last_iteration is None:
            return self
        used, unused = self.iterations, self.epochs
        if self.learns_from_rewards():
            used, unused = unused, used
        if used != chain(self.num_iterations) or unused or self.last_iteration != iteration_key(self.num_iterations):
            raise ValueError(
                "`iterations`, `epochs` and `last_iteration` do not spell "
                f"num_iterations: {self.num_iterations} for algorithm: {self.algorithm}; "
                f"run `comlrl iterations {self.num_iterations}`"
            )
        return self

    def run_config(self) -> RunConfig:
        """The run alone."""
        return RunConfig.model_validate(self.model_dump(include=set(RunConfig.model_fields), exclude_unset=True))


def chain(num_iterations: int) -> dict[str, dict[str, str]]:
    """The chain of `params.yaml`: each iteration names the one before."""
    return {iteration_key(n): {"previous": iteration_key(n - 1)} for n in range(1, num_iterations + 1)}


def chains(config: RunConfig) -> dict[str, Any]:
    """What `params.yaml` holds beside the settings, for DVC."""
    spelt = chain(config.num_iterations)
    rewards = config.learns_from_rewards()
    return {
        "last_iteration": iteration_key(config.num_iterations),
        "iterations": {} if rewards else spelt,
        "epochs": spelt if rewards else {},
    }
