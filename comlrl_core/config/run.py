"""All settings of one training run: what `params.yaml` holds and what the Prefect form asks for."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.config.base import Settings

TRAINING_CONFIGS: dict[str, type[MADPOConfig]] = {"madpo": MADPOConfig, "madpo_iter": MADPOIterConfig}
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

    algorithm: Literal["madpo_iter", "madpo"] = Field("madpo_iter", description="Iterative or offline multi-agent DPO.")
    num_iterations: int = Field(
        6, ge=1, le=9999, description="Iterations of collect, draw and update (1 for the offline algorithm)."
    )
    team: TeamSettings = Field(default_factory=TeamSettings, description="Who answers.")
    tasks: TaskSettings = Field(default_factory=TaskSettings, description="What is answered.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="Who scores the answers.")
    training: MADPOIterConfig | MADPOConfig = Field(
        default_factory=dict,
        validate_default=True,
        description="How the team learns (the published settings).",
    )
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="How progress is measured.")
    tracking: TrackingSettings = Field(default_factory=TrackingSettings, description="What MLflow records.")

    @model_validator(mode="before")
    @classmethod
    def _one_collection_offline(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("algorithm") == "madpo" and "num_iterations" not in values:
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
        if isinstance(training, MADPOConfig):
            training = training.model_dump(exclude_unset=True)
        if not isinstance(training, Mapping):
            raise ValueError("a mapping of training settings is needed")
        training = _without_unused_iterative_fields(dict(training), model)
        if "num_iterations" in model.model_fields:
            if training.setdefault("num_iterations", count) != count:
                raise ValueError(
                    f"num_iterations {training['num_iterations']} here differs from the top level's {count}; "
                    "set the top level's alone"
                )
        elif count != 1:
            raise ValueError(f"num_iterations must be 1 for the offline algorithm madpo, not {count}")
        return model.model_validate(training)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A form asks for the iterative algorithm's training settings: they include the offline one's.

        One schema instead of a choice of two lets the check of a form name the field at fault.
        """
        schema = handler.resolve_ref_schema(handler(core_schema))
        training = schema["properties"]["training"]
        iterative = training.pop("anyOf")[0]
        schema["properties"]["training"] = {**training, **iterative}
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

    def values(self) -> dict[str, Any]:
        """Every setting as plain data, ready for YAML, JSON or a form (`num_iterations` once, at the top)."""
        values = self.model_dump(mode="json")
        values["training"].pop("num_iterations", None)
        return values


def _without_unused_iterative_fields(training: dict[str, Any], model: type[MADPOConfig]) -> dict[str, Any]:
    """Leave out iterative settings at their defaults where the algorithm has none: a form sends them all."""
    fields = MADPOIterConfig.model_fields
    unused = [name for name in training if name in fields and name not in model.model_fields]
    return {
        name: value
        for name, value in training.items()
        if name not in unused or value != fields[name].get_default(call_default_factory=True)
    }


def model_free(training: Any) -> Any:
    """Training settings that cannot be read yet, because the algorithm itself was refused."""
    return MADPOIterConfig() if isinstance(training, Mapping) else training


class ParamsFile(RunConfig):
    """`params.yaml`: a run, and the chain of iterations spelt out for DVC."""

    last_iteration: str | None = Field(None, pattern=r"^\d{4}$", description="Name of the last iteration.")
    iterations: dict[str, dict[str, str]] | None = Field(
        None, description="Iteration name -> {previous: name of the iteration before}."
    )

    @model_validator(mode="after")
    def _chain_is_whole(self) -> "ParamsFile":
        if self.iterations is None and self.last_iteration is None:
            return self
        if self.iterations != chain(self.num_iterations) or self.last_iteration != iteration_key(self.num_iterations):
            raise ValueError(
                f"`iterations` and `last_iteration` do not spell num_iterations: {self.num_iterations}; "
                f"run `comlrl iterations {self.num_iterations}`"
            )
        return self

    def run_config(self) -> RunConfig:
        """The run alone."""
        return RunConfig.model_validate(self.model_dump(include=set(RunConfig.model_fields), exclude_unset=True))


def chain(num_iterations: int) -> dict[str, dict[str, str]]:
    """The `iterations` mapping of `params.yaml`: each iteration names the one before."""
    return {iteration_key(n): {"previous": iteration_key(n - 1)} for n in range(1, num_iterations + 1)}
