"""Models and tokenizers from a Hugging Face name, a folder, a loaded object or `builtin:tiny`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.team.pretrained import load_tiny_pretrained
from comlrl_core.team.sources import (
    ALLOWED_SOURCES,
    BUILTIN,
    BUILTIN_TINY_PRETRAINED,
    BUILTINS,
    check_model_folder,
    model_folder,
)
from comlrl_core.team.tiny import load_tiny

# `from_pretrained` arguments that say which files to read, so they hold for the tokenizer too.
SHARED_WITH_TOKENIZER = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "token",
    "trust_remote_code",
)
# A name with a slash is a kernel on the hub.
ALLOWED_ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "paged|eager",
    "paged|sdpa",
    "paged|flash_attention_2",
)
# Memory from torch's own allocator begins at multiples of this; vectorised sums over memory that does not
# round otherwise.
ALIGNMENT = 64


def load_model_and_tokenizer(
    source: str | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    model_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode (dropout off) on `device`, and its tokenizer.

    `model_config`: `dtype` (or `torch_dtype`), `attn_implementation`, `special_tokens` (a mapping as for
    `add_special_tokens`, or a list of extra tokens; the embeddings grow with them), `model_kwargs`;
    everything else goes to `from_pretrained`. `seed` initialises what is not in the files: the tiny model,
    embeddings of new tokens. `device` None means the GPU if there is one, and for a loaded object: where it
    is. Parameters lie in fresh memory, not in a mapped file. Raises `ConfigError` naming a source that cannot
    be loaded and what is allowed.
    """
    options = _options(model_config)
    special_tokens = options.pop("special_tokens")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        if isinstance(source, PreTrainedModel):
            model, tokenizer = source, _tokenizer_of_object(source, tokenizer, options)
            _to_fresh_memory(model, only_misaligned=True)
        else:
            model, tokenizer = _load(source, tokenizer, seed, options)
            _to_fresh_memory(model)
            device = device or default_device()
        if special_tokens:
            _add_special_tokens(model, tokenizer, special_tokens)
    if device is not None and not hasattr(model, "hf_device_map"):
        model.to(torch.device(device))  # type: ignore[arg-type]
    return model.eval(), tokenizer


def load_backbone(
    folder: str | Path, device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model without a language-model head, and the tokenizer, that lie in a folder; in eval mode.

    `device` None means the GPU if there is one. Raises `DataError` for a folder that holds no whole model.
    """
    check_model_folder(Path(folder))
    try:
        with quiet_transformers():
            model = AutoModel.from_pretrained(folder)
    except Exception as error:  # as in `_load`
        raise DataError(f"{folder}: its model cannot be loaded: {_first_line(error)}") from error
    _to_fresh_memory(model)
    model.to(torch.device(device) if device is not None else default_device())
    return model.eval(), _load_tokenizer(str(folder), {})


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of Transformers' own inside: a stage shows one bar, its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def check_options(source: str, model_config: Mapping[str, Any] | None) -> None:
    """Refuse `model_config` where it can be known to fail: dtype, attention, special tokens, unknown names."""
    options = _options(model_config)
    special_tokens = options.pop("special_tokens")
    if special_tokens is not None and not _are_tokens(special_tokens):
        raise ConfigError(
            f"special_tokens must be a list of texts, or a mapping of token names, not {special_tokens!r}"
        )
    if source in BUILTINS:
        _check_builtin_options(source, options)
    attention = options.get("attn_implementation")
    if attention is not None and attention not in ALLOWED_ATTENTION and "/" not in str(attention):
        raise ConfigError(f"attn_implementation {attention!r} is unknown; allowed: {', '.join(ALLOWED_ATTENTION)}")


def _are_tokens(value: Any) -> bool:
    texts = list(value.values()) if isinstance(value, Mapping) else value
    return isinstance(texts, list | tuple) and all(
        isinstance(text, str) or (isinstance(text, list | tuple) and all(isinstance(one, str) for one in text))
        for text in texts
    )


def _check_builtin_options(source: str, options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - {"dtype", "attn_implementation"})
    if unknown:
        raise ConfigError(
            f"{source!r} takes dtype, attn_implementation and special_tokens in model_config, not {', '.join(unknown)}"
        )


def _options(model_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments for `from_pretrained`, and `special_tokens`."""
    options = dict(model_config or {})
    options.pop("critic_model_kwargs", None)  # for critics only
    inner = options.pop("model_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"model_kwargs in model_config must be a mapping, not {inner!r}")
    for name, value in inner.items():
        if name in options and options[name] != value:
            raise ConfigError(f"model_config and its model_kwargs give different values for {name!r}")
        options[name] = value
    if "torch_dtype" in options:
        torch_dtype = options.pop("torch_dtype")
        if options.setdefault("dtype", torch_dtype) != torch_dtype:
            raise ConfigError("model_config gives both dtype and torch_dtype, and they differ: keep dtype")
    if options.get("dtype") is None:
        options.pop("dtype", None)
    else:
        options["dtype"] = _dtype(options["dtype"])
    options["special_tokens"] = options.pop("special_tokens", None)
    return options


def _dtype(value: Any) -> Any:
    if value == "auto" or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"unknown dtype {value!r}; allowed: 'float32', 'bfloat16', 'float16', 'auto'")
    return dtype


def _load(
    source: str, tokenizer: str | PreTrainedTokenizerBase | None, seed: int, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if source.startswith(BUILTIN):
        model, own = _load_builtin(source, seed, options)
        return model, own if tokenizer is None else _load_tokenizer(tokenizer, {})
    folder = model_folder(source)
    try:
        if folder is not None:
            check_model_folder(folder)
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as error:  # options, files, the hub: Transformers and safetensors raise many classes
        raise ConfigError(
            f"cannot load the model {source!r}: {_first_line(error)}. Allowed: {ALLOWED_SOURCES}"
        ) from error
    shared = {name: options[name] for name in SHARED_WITH_TOKENIZER if name in options}
    return model, _load_tokenizer(source if tokenizer is None else tokenizer, shared)


def _load_builtin(source: str, seed: int, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if source not in BUILTINS:
        raise ConfigError(f"there is no model {source!r}; allowed: {ALLOWED_SOURCES}")
    _check_builtin_options(source, options)
    model, tokenizer = load_tiny_pretrained() if source == BUILTIN_TINY_PRETRAINED else load_tiny(seed)
    if options.get("attn_implementation"):
        try:
            model.set_attn_implementation(options["attn_implementation"])
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"attn_implementation {options['attn_implementation']!r} cannot be used: {_first_line(error)}"
            ) from error
    if options.get("dtype", "auto") != "auto":
        _cast(model, options["dtype"])
    return model, tokenizer


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of what is saved, as `from_pretrained` does.

    A buffer that is not saved (the frequencies of rotary positions) stays in fp32: it is worked out anew at loading,
    and `model.to` would round it, so that the model would score otherwise after it was saved and loaded.
    """
    saved = model.state_dict(keep_vars=True)
    for tensor in {id(tensor): tensor for tensor in saved.values()}.values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _load_tokenizer(source: str | PreTrainedTokenizerBase, shared: dict[str, Any]) -> PreTrainedTokenizerBase:
    if not isinstance(source, str):
        return source
    if source in BUILTINS:
        return load_tiny(0)[1]
    model_folder(source)
    # `AutoTokenizer` swaps a generic tokenizer for the class usual for some model types (Qwen2, Phi-3): other
    # splitting rules, other ids than before it was saved. Its own class reads what is in the file.
    reader = PreTrainedTokenizerFast if _is_generic_tokenizer(source) else AutoTokenizer
    try:
        loaded: PreTrainedTokenizerBase = reader.from_pretrained(source, **shared)
    except Exception as error:  # tokenizers raises `Exception` itself for a file that it cannot read
        raise ConfigError(f"cannot load the tokenizer {source!r}: {_first_line(error)}") from error
    return loaded


def _is_generic_tokenizer(source: str) -> bool:
    file = Path(source).expanduser() / "tokenizer_config.json"
    if not file.is_file():
        return False
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") == "TokenizersBackend")
    except (ValueError, AttributeError):
        return False  # `AutoTokenizer` reports what is wrong with the file


def _tokenizer_of_object(
    model: PreTrainedModel, tokenizer: str | PreTrainedTokenizerBase | None, options: dict[str, Any]
) -> PreTrainedTokenizerBase:
    if options:
        raise ConfigError(
            "model_config may only hold special_tokens for a loaded model, "
            f"not {', '.join(sorted(options))}: the model was built by whoever passes it"
        )
    if tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer: pass tokenizer=... (one, or one per agent)")
    return _load_tokenizer(tokenizer, {})


def _add_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, special_tokens: Any) -> None:
    """Add tokens and grow the embeddings (never shrink: many models keep spare rows)."""
    if not isinstance(special_tokens, Mapping):
        special_tokens = {"extra_special_tokens": list(special_tokens)}
    try:
        tokenizer.add_special_tokens(dict(special_tokens), replace_extra_special_tokens=False)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"special_tokens {special_tokens!r}: {_first_line(error)}") from error
    if len(tokenizer) > cast(nn.Embedding, model.get_input_embeddings()).num_embeddings:
        model.resize_token_embeddings(len(tokenizer))


def _to_fresh_memory(model: PreTrainedModel, only_misaligned: bool = False) -> None:
    """Move parameters and buffers into torch's own memory, in place, so that tied ones stay tied.

    Loaded weights may be a view of the file: at an address without alignment, where the same product rounds
    differently.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and not (only_misaligned and tensor.data_ptr() % ALIGNMENT == 0):
            tensor.data = tensor.data.clone()


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
