"""The settings as a reference page: one table per section, made from the fields themselves."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from comlrl_core.algorithms.actor_critic_config import IACConfig, MAACConfig
from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.algorithms.reinforce_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
from comlrl_core.config.lora import LoraSettings
from comlrl_core.config.run import RunConfig

INTRODUCTION = """# Settings

Everything that can be set in `params.yaml`, in the Prefect form and with `--set section.key=value`. An unknown name, a
value out of bounds or settings that contradict each other are refused before a model is loaded, by name.

The defaults below are those of a setting that is left out. For training settings they are the published ones; the
`params.yaml` of this repository sets better values where it matters (`top_p`, `top_k`, `temperature`, batch sizes).
"""


LORA = "Low-rank adapters, for every algorithm; left out: whole models are trained."

# Algorithm, its settings, and the algorithm (with its settings) that its table is compared with.
SIBLINGS: tuple[tuple[str, type[BaseModel], type[BaseModel] | None, str], ...] = (
    ("madpo_iter", MADPOIterConfig, None, ""),
    ("madpo", MADPOConfig, MADPOIterConfig, "madpo_iter"),
    ("marlhf_iter", MARLHFIterConfig, MADPOIterConfig, "madpo_iter"),
    ("marlhf", MARLHFConfig, MARLHFIterConfig, "marlhf_iter"),
    ("magrpo", MAGRPOConfig, None, ""),
    ("marloo", MARLOOConfig, MAGRPOConfig, "magrpo"),
    ("maremax", MAReMaxConfig, MAGRPOConfig, "magrpo"),
    ("mareinforce", MAREINFORCEConfig, MAGRPOConfig, "magrpo"),
    ("maac", MAACConfig, MAGRPOConfig, "magrpo"),
    ("iac", IACConfig, MAACConfig, "maac"),
)


def settings_markdown() -> str:
    """The reference page of all settings (`docs/settings.md`)."""
    parts = [INTRODUCTION, "## Top level\n\n" + _table(RunConfig)]
    for name, field in RunConfig.model_fields.items():
        model = _section(field)
        if model is not None and name != "training":
            parts.append(f"## `{name}`\n\n{field.description}\n\n{_table(model)}")
    parts.append(f"## `team.lora`\n\n{LORA}\n\n{_table(LoraSettings)}")
    for algorithm, model, twin, twin_name in SIBLINGS:
        head = f"## `training` with `algorithm: {algorithm}`\n\nIn Python: `{model.__name__}`."
        if twin is not None:
            head += f" As for `{twin_name}`, with these fields more or other defaults and choices:"
        parts.append(f"{head}\n\n{_table(model, only_where_different_from=twin)}")
    return "\n".join(parts)


def _table(
    model: type[BaseModel],
    only_where_different_from: type[BaseModel] | None = None,
) -> str:
    rows = ["| setting | default | allowed | what it is |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if _section(field) is not None and model is RunConfig:  # sections have tables of their own
            continue
        row = f"| `{name}` | {_default(field)} | {_allowed(field)} | {field.description or ''} |"
        other = only_where_different_from
        if other is not None:
            twin = other.model_fields.get(name)
            if (
                twin is not None
                and row == f"| `{name}` | {_default(twin)} | {_allowed(twin)} | {twin.description or ''} |"
            ):
                continue
        rows.append(row)
    return "\n".join(rows) + "\n"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    if _section(field) is not None:
        return "see its table" if field.is_required() or field.get_default() is not None else "`null`"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _allowed(field: FieldInfo) -> str:
    if _section(field) is not None:
        return "mapping"
    parts = list(dict.fromkeys(_types(field.annotation)))
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for constraint in field.metadata:
        for attribute, symbol in symbols.items():
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                parts.append(f"{symbol} {bound}")
    return ", ".join(parts)


def _types(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (f"`{choice}`" for choice in get_args(annotation))
    elif origin in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _types(inner)
    elif annotation is type(None):
        yield "null"
    elif origin in (list, tuple):
        yield f"list of {' or '.join(_types(get_args(annotation)[0]))}"
    elif origin is dict or annotation is dict:
        yield "mapping"
    else:
        yield {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(annotation, "any")
