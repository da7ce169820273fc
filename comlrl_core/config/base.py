"""The base of all settings, and how a refused setting is explained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from comlrl_core.errors import ConfigError


class Settings(BaseModel):
    """A group of settings: unknown keys, infinities and NaN are errors, also on assignment."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        validate_assignment=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` would pass for 1 where a number is expected."""
        if isinstance(value, bool) and bool not in _plain_types(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"{str(value).lower()} is not allowed here")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    """The types in an annotation, those inside unions, lists and `Annotated` included."""
    inner = get_args(annotation)
    return {annotation}.union(*map(_plain_types, inner)) if inner else {annotation}


SECRET_FIELDS = "comparator_api_"
SHOWN_CHARACTERS = 200

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def validate(model: type[AnySettings], values: Mapping[str, Any], source: str | Path) -> AnySettings:
    """Build `model` from `values`; a refused setting becomes a `ConfigError` that names `source` and the field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error, source, model)) from None


def explain(error: ValidationError, source: str | Path, model: type[BaseModel] | None = None) -> str:
    """One line per refused field: source, dotted name, what is wrong, what was given and what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "settings"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown setting{_did_you_mean(problem['loc'], model)}"
        elif problem["type"] not in {"missing", "value_error"}:
            message = f"{message} (got {_shown(problem['input'], where)})"
        lines.append(f"{source}: {where}: {message}")
    return "\n".join(lines)


def _shown(value: Any, where: str) -> str:
    """A refused value for people; what was meant for a remote model may be a key, and a key is never shown."""
    if isinstance(value, Mapping) or (SECRET_FIELDS in where and not isinstance(value, bool | int | float)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _did_you_mean(location: tuple[int | str, ...], model: type[BaseModel] | None) -> str:
    """The nearest known name beside the unknown one, and all of them when none is near."""
    import difflib

    for part in location[:-1]:
        if model is None or part not in model.model_fields:
            return ""
        model = _nested_model(model.model_fields[str(part)].annotation)
    if model is None:
        return ""
    near = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(model.model_fields))}"


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
