"""Reading `params.yaml` and applying `key=value` overrides."""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from comlrl_core.config.base import validate
from comlrl_core.config.run import ParamsFile, RunConfig
from comlrl_core.errors import ConfigError


def read_params(path: Path) -> ParamsFile:
    """Read and check a parameter file; a `ConfigError` names the file and the line or the field."""
    return validate(ParamsFile, read_yaml(path), path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file (where `1e-5` is a number)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such parameter file; `comlrl init` makes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of settings is expected, not {type(values).__name__}")
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with `section.key=value` replaced; the values are YAML (`null`, `0.3`, `[a, b]`).

    An override of `num_iterations` or `algorithm` drops the spelt-out chain, which no longer fits.
    """
    result = _copy(values)
    for override in overrides:
        name, separator, text = override.partition("=")
        parts = name.strip().split(".")
        if not separator or not all(parts):
            raise ConfigError(f"--set {name!r}: expected section.key=value, for example training.dpo_beta=0.3")
        target = result
        for part in parts[:-1]:
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {name!r}: {part!r} is a value, not a section")
            target = inner
        # Errors show the name alone: the value may be a key that somebody takes for a setting.
        target[parts[-1]] = _parse(text, f"--set {name.strip()}")
    if any(result.get(name) != values.get(name) for name in ("num_iterations", "algorithm")):
        for name in ("iterations", "epochs", "last_iteration"):
            result.pop(name, None)
    return result


def resolve(values: Mapping[str, Any], source: str | Path) -> RunConfig:
    """The run described by the values of a parameter file."""
    return validate(ParamsFile, values, source).run_config()


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Plain data as YAML text, in the given order."""
    out = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(_copy(values), out)
    return out.getvalue()


def _parse(text: str, source: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except (ValueError, RecursionError) as error:  # a date that there is not, a number of 5,000 digits, endless nesting
        raise ConfigError(f"{source}: not valid YAML: {str(error).partition(';')[0]}") from None


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    return value
