"""What a model's name means, and whether its files are whole, without loading anything.

A source is `builtin:tiny`, a folder that `save_pretrained` wrote, or a name on the Hugging Face hub. Everything here
reads small JSON files and headers: no PyTorch, no Transformers, no network.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import read_json

BUILTIN = "builtin:"
BUILTIN_TINY = "builtin:tiny"
BUILTIN_TINY_PRETRAINED = "builtin:tiny-pretrained"
BUILTINS = (BUILTIN_TINY, BUILTIN_TINY_PRETRAINED)
TINY_CONTEXT_LENGTH = 1024
ALLOWED_SOURCES = (
    f"{', '.join(map(repr, BUILTINS))}, a folder written by save_pretrained, or a name on the Hugging Face hub"
)

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
_HEADER_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")  # what huggingface_hub takes for true


def check_source(source: str, options: Mapping[str, Any] | None = None, *, look_in_cache: bool = True) -> None:
    """Refuse a source that cannot be loaded, as far as files and names tell; a hub name is not looked up there.

    Offline, a hub name must be in the local cache (unless `look_in_cache` is off); `options` are those of the model
    loader, of which `cache_dir` and `revision` count here. Raises `ConfigError` for a name, `DataError` for a damaged
    file.
    """
    if source.startswith(BUILTIN):
        if source not in BUILTINS:
            raise ConfigError(f"there is no model {source!r}; allowed: {ALLOWED_SOURCES}")
        return
    folder = model_folder(source)
    if folder is not None:
        check_model_folder(folder)
        return
    if not is_hub_name(source):
        raise ConfigError(f"{source!r} is no name of a model. Allowed: {ALLOWED_SOURCES}")
    if look_in_cache and offline() and not _cached(source, "config.json", options or {}):
        variables = " and ".join(name for name in OFFLINE_VARIABLES if _is_true(name))
        raise ConfigError(
            f"the model {source!r} is not in the local Hugging Face cache, and {variables} forbids downloading it. "
            f"Allowed: {ALLOWED_SOURCES}"
        )


def check_loadable(setting: str, source: str) -> None:
    """Like `check_source`, and of a name on the Hugging Face hub the configuration is read.

    Raises `ConfigError` that names `setting`.
    """
    try:
        check_source(source)
        if not source.startswith(BUILTIN) and model_folder(source) is None:
            from transformers import AutoConfig

            AutoConfig.from_pretrained(source)
    except (DataError, ConfigError) as error:
        raise ConfigError(f"{setting}: {error}") from error
    except Exception as error:  # the hub and its cache raise many classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{setting}: {source!r} cannot be loaded: {reason}") from error


def model_folder(source: str) -> Path | None:
    """The folder that `source` names, or None for another kind of source.

    Raises `ConfigError` for what looks like a path and is none of a model folder.
    """
    path = Path(source).expanduser()
    if not (source.startswith((".", "/", "~")) or source.count("/") > 1 or path.exists()):
        return None
    if not path.is_dir():
        raise ConfigError(f"there is no model folder {source!r}. Allowed: {ALLOWED_SOURCES}")
    if not any((path / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise ConfigError(f"the folder {source!r} holds no model: config.json is missing. Allowed: {ALLOWED_SOURCES}")
    return path


def is_hub_name(name: str) -> bool:
    """Whether `name` could be one on the Hugging Face hub: `name` or `owner/name`."""
    return bool(_HUB_NAME.fullmatch(name)) and ".." not in name and "--" not in name and not name.endswith((".", "-"))


def offline() -> bool:
    """Whether the environment forbids asking the hub."""
    return any(map(_is_true, OFFLINE_VARIABLES))


def check_model_folder(folder: Path) -> None:
    """Refuse a folder without a readable `config.json`, whole weights, or a tokenizer; or without a whole adapter."""
    if (folder / "adapter_config.json").is_file():
        read_json(folder / "adapter_config.json")
        check_safetensors(folder / "adapter_model.safetensors")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise DataError(f"{config} is missing: the folder holds no model")
    if not isinstance(read_json(config), dict):
        raise DataError(f"{config}: expected an object of model settings")
    check_weights(folder)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file() and not isinstance(read_json(tokenizer), dict):
        raise DataError(f"{tokenizer}: expected an object of tokenizer settings")
    vocabulary = folder / "tokenizer.json"
    if vocabulary.is_file():
        read_json(vocabulary)


def check_weights(folder: Path) -> None:
    """Refuse a folder without weights, with a torn safetensors file, or with a part missing that its index lists."""
    for index in (folder / name for name in _INDEXES):
        if not index.is_file():
            continue
        listed = read_json(index)
        parts = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise DataError(f"{index}: field 'weight_map': expected an object of weights and their files")
        for part in sorted(set(parts.values())):
            if not (folder / part).is_file():
                raise DataError(f"{folder / part} is missing, and {index.name} lists it")
    found = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not found:
        raise DataError(f"{folder}: there are no weights here (expected model.safetensors)")
    for path in found:
        if path.suffix == ".safetensors":
            check_safetensors(path)
        elif path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file that is not as long as its header says, or whose header cannot be read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            if not 0 < length <= min(_LARGEST_HEADER, size - _HEADER_LENGTH_BYTES):
                raise DataError(f"{path}: not a whole safetensors file ({size} bytes, no header)")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise DataError(f"{path}: not a whole safetensors file (its header cannot be read)") from None
    expected = _HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise DataError(f"{path}: not a whole safetensors file ({size} bytes, its header says {expected})")


def has_chat_template(source: str, options: Mapping[str, Any] | None = None) -> bool | None:
    """Whether the tokenizer of `source` has a chat template; None where only the hub could say."""
    if source.startswith(BUILTIN):
        return False
    files = dict(_tokenizer_files(source, options or {}))
    if any(name in files for name in _TEMPLATE_FILES):
        return True
    settings = files.get("tokenizer_config.json")
    if settings is None:
        return False if model_folder(source) is not None else None
    values = read_json(settings)
    if isinstance(values, dict) and values.get("chat_template"):
        return True
    return False if model_folder(source) is not None else None  # of a hub's files, the cache may hold a part


def _tokenizer_files(source: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    folder = model_folder(source)
    for name in (*_TEMPLATE_FILES, "tokenizer_config.json"):
        path = folder / name if folder is not None else _cached(source, name, options)
        if path is not None and path.is_file():
            yield name, path


def context_limit(source: str) -> int | None:
    """The longest sequence in tokens that the model's configuration allows; None where it says nothing here."""
    if source in BUILTINS:
        return TINY_CONTEXT_LENGTH
    folder = None if source.startswith(BUILTIN) else model_folder(source)
    config = read_json(folder / "config.json") if folder is not None else {}
    for values in (config.get("text_config"), config):
        if not isinstance(values, dict):
            continue
        for name in CONTEXT_FIELDS:
            if isinstance(values.get(name), int) and values[name] > 0:
                return int(values[name])
    return None


def _cached(source: str, name: str, options: Mapping[str, Any]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # here: it costs a quarter of a second

    revision = options.get("revision")
    found = try_to_load_from_cache(source, name, cache_dir=options.get("cache_dir"), revision=revision)
    return Path(found) if isinstance(found, str) else None


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in _TRUE
