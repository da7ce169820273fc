"""Finding a reward function by the name in a settings file, and naming the version that was found."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from comlrl_core.errors import ConfigError
from comlrl_core.rewards.contract import RewardFunction, function_name

BUILTIN_PREFIX = "builtin:"
BUILTIN_REWARDS = {"length_ratio": "comlrl_core.rewards.length_ratio:length_ratio"}
FORMS = (
    f"{BUILTIN_PREFIX}<name> ({', '.join(sorted(BUILTIN_REWARDS))}), package.module:function, or my_rewards.py:function"
)
VERSION_DIGITS = 16


class LoadedReward(NamedTuple):
    """A reward function ready to call, its name, and a digest of its source file and keyword arguments."""

    func: RewardFunction
    name: str
    version: str


def load_reward(
    spec: str,
    kwargs: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    setting: str = "reward_func",
) -> LoadedReward:
    """The reward function that `spec` names, with `kwargs` bound to it; errors start with `setting`.

    `spec` is `builtin:<name>`, `package.module:function` or `my_rewards.py:function`; a relative file is
    looked for under `root` (default: the working folder), which becomes importable too. Raises `ConfigError`
    saying what is missing.
    """
    folder = Path(root) if root is not None else Path.cwd()
    target = _builtin(spec, setting) if spec.startswith(BUILTIN_PREFIX) else spec
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(f"{setting}: {spec!r} names no function; allowed: {FORMS}")
    module = (
        _load_file(folder / place, spec, setting)
        if place.endswith(".py")
        else _load_module(place, spec, folder, setting)
    )
    func: Any = module
    for part in name.split("."):
        func = getattr(func, part, None)
    if func is None or not callable(func):
        what = "is not callable" if func is not None else "does not exist"
        raise ConfigError(f"{setting}: {name!r} in {place} {what} ({spec!r})")
    bound = dict(kwargs or {})
    bound_func = _bind(func, bound, spec, setting)
    shown, home = _module_function(func) or (spec.removeprefix(BUILTIN_PREFIX), module)
    try:
        version = _version(_source_bytes(home), bound)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}: the keyword arguments of {spec!r} must be plain values: {error}") from error
    return LoadedReward(bound_func, shown, version)


def identify_reward(func: RewardFunction) -> tuple[str, str]:
    """(name, version) of a function given as an object: those that `load_reward` gives to the same function.

    A function that a module holds is known by its module's source file, helpers included. Any other callable (a nested
    function, an instance, a function of the script that runs) is known by its own source text. Without readable source
    (written in C, typed into a console), or with bound arguments that are no plain values, it is `unversioned`.
    """
    inner, bound = func, {}
    if isinstance(func, functools.partial):
        inner, bound = func.func, {**func.keywords, **({"*": func.args} if func.args else {})}
    found = _module_function(inner)
    target = inner if inspect.isroutine(inner) else type(inner)
    own_name = f"{getattr(target, '__module__', None)}:{getattr(target, '__qualname__', function_name(inner))}"
    name = found[0] if found else own_name
    try:
        source = _source_bytes(found[1]) if found else inspect.getsource(target).encode()
        return name, _version(source, bound)
    except (OSError, TypeError, ValueError):
        return name, "unversioned"


def source_file(spec: str, root: str | Path | None = None) -> Path | None:
    """The user's own file behind `spec` (a `.py` file, a module under `root`); None for what is installed."""
    folder = Path(root) if root is not None else Path.cwd()
    place = spec.rpartition(":")[0]
    if spec.startswith(BUILTIN_PREFIX) or not place:
        return None
    if place.endswith(".py"):
        return folder / place
    parts = place.split(".")
    candidates = (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py"))
    return next((path for path in candidates if path.is_file()), None)


def _module_function(func: Any) -> tuple[str, ModuleType] | None:
    """The one name of a function that its module holds, whichever way it was reached, and the module; else None.

    The name is `length_ratio` for a built-in one, `my_rewards.py:score` for a file that is no part of a package, and
    `package.module:score` for the rest. The script that runs (`__main__`) is left out: it holds the settings of the run
    too, which may change without another reward.
    """
    module = sys.modules.get(getattr(func, "__module__", None) or "")
    if not inspect.isfunction(func) or module is None or module.__name__ == "__main__":
        return None
    held: Any = module
    for part in func.__qualname__.split("."):
        held = getattr(held, part, None)
    if held is not func:
        return None
    place = f"{module.__name__}:{func.__qualname__}"
    builtin = next((name for name, known in BUILTIN_REWARDS.items() if known == place), None)
    if builtin is not None:
        return builtin, module
    file = Path(getattr(module, "__file__", None) or "").name
    alone = "." not in module.__name__ and file not in ("", "__init__.py")
    return f"{file}:{func.__qualname__}" if alone else place, module


def _builtin(spec: str, setting: str) -> str:
    name = spec.removeprefix(BUILTIN_PREFIX)
    if name not in BUILTIN_REWARDS:
        raise ConfigError(f"{setting}: there is no built-in reward {name!r}; allowed: {FORMS}")
    return BUILTIN_REWARDS[name]


def _make_importable(folder: Path) -> None:
    """Let modules in `folder` be imported, after all that is installed (they must shadow no package)."""
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.append(entry)


def _load_file(path: Path, spec: str, setting: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path} ({spec!r})")
    _make_importable(path.parent)
    source = path.read_bytes()
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source).hexdigest()
    module_name = f"comlrl_user_{path.stem}_{digest[:VERSION_DIGITS]}"
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None:
        raise ConfigError(f"{setting}: {path} cannot be imported ({spec!r})")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # data classes and pickling look modules up by name
    try:
        # Compiled from the bytes of the digest: a cached compilation of the file may be that of an edit before.
        with _no_bytecode():
            exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"{setting}: importing {path}{_line(error, path)} raised {type(error).__name__}: {error}"
        ) from error
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Leave no `__pycache__` beside the user's files: a check of the settings writes nothing."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file an import ended; the text of a syntax error says so itself."""
    if isinstance(error, SyntaxError):
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}," if lines else ""


def _load_module(name: str, spec: str, folder: Path, setting: str) -> ModuleType:
    _make_importable(folder)
    try:
        with _no_bytecode():
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting}: importing {name} raised {type(error).__name__}: {error} ({spec!r}; allowed: {FORMS})"
        ) from error


def _bind(func: Any, kwargs: dict[str, Any], spec: str, setting: str) -> RewardFunction:
    if not kwargs:
        return func
    if taken := {"batch_items", "prompts"} & kwargs.keys():
        raise ConfigError(
            f"{setting}: {sorted(taken)[0]!r} is passed by the training; {spec!r} cannot be given another"
        )
    try:
        inspect.signature(func).bind_partial(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{setting}: {spec!r} does not take the keyword arguments {kwargs}: {error}") from error
    except ValueError:
        pass  # no signature to check
    bound = functools.partial(func, **kwargs)
    bound.__dict__["__name__"] = function_name(func)
    if (reward_range := getattr(func, "reward_range", None)) is not None:
        bound.__dict__["reward_range"] = reward_range
    return bound


def _source_bytes(module: ModuleType) -> bytes:
    path = getattr(module, "__file__", None)
    return Path(path).read_bytes() if path and Path(path).is_file() else module.__name__.encode()


def _version(source: bytes, kwargs: Mapping[str, Any]) -> str:
    """Digest of source and bound arguments; a `TypeError` or `ValueError` where these are no plain values."""
    settings = json.dumps(kwargs, sort_keys=True, allow_nan=False)
    return hashlib.sha256(source + b"\0" + settings.encode()).hexdigest()[:VERSION_DIGITS]
