"""Agents as low-rank adapters on one base model: N agents cost little more memory than one.

    base, loaded once, frozen      adapter 0 = agent 0, adapter 1 = agent 1, ...      no adapter = the reference

`AdapterModel` is what the rest of the package sees as an agent's model: its parameters are the adapter's alone, so an
engine on it steps nothing else, and calling it switches the base to its adapter for the time of the call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.config.lora import LoraSettings
from comlrl_core.errors import ConfigError, DataError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
Loader = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


class SharedBase:
    """A frozen base model with the adapters of some agents in it; `load` loads the same base again."""

    def __init__(self, load: Loader) -> None:
        self.load = load
        self.model, self.tokenizer = load()
        self.model.requires_grad_(False)
        self.model.eval()  # for good: updates run without dropout
        self.layers: list[BaseTunerLayer] = []

    def add(self, name: str, config: LoraConfig, seed: int) -> None:
        """Put one more adapter in; its first matrices are drawn from `seed`, its second ones are zero."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are the purpose
            torch.manual_seed(seed % 2**63)
            try:
                inject_adapter_in_model(config, self.model, name)
            except ValueError as error:
                raise ConfigError(f"lora: {str(error).splitlines()[0]}") from error
        self.layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        self.model.eval()
        for own in self.parameters(name).values():
            own.requires_grad_(True)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The weights of an adapter, by their names in the base."""
        mark = f".{name}."
        return {key.replace(mark, "."): p for key, p in self.model.named_parameters() if mark in key}

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """One adapter, or none, for the calls in the block.

        PEFT's own switch also decides which adapters may get gradients. Here all may, always: the graphs of several
        agents wait for their backward pass at the same time.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self.layers]
        for layer in self.layers:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = name
        try:
            yield
        finally:
            for layer, (adapter, disabled) in zip(self.layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = adapter, disabled


class AdapterModel(nn.Module):
    """A base model seen through one adapter; `name` None: the base itself, which has nothing to train."""

    def __init__(self, base: SharedBase, name: str | None, settings: LoraSettings | None = None) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.settings = settings
        if name is not None:
            for key, parameter in base.parameters(name).items():
                self.register_parameter(key.replace(".", "/"), parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the base model's."""
        with self.base.active(self.name):
            return self.base.model(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The adapter's; those of the base where there is no adapter (frozen, and good for asking the device)."""
        return super().parameters(recurse) if self.name is not None else self.base.model.parameters(recurse)

    def get_base_model(self) -> PreTrainedModel:
        """The model whose `forward` names its arguments."""
        return self.base.model

    def get_input_embeddings(self) -> nn.Module:
        return self.base.model.get_input_embeddings()

    @property
    def config(self) -> Any:
        return self.base.model.config

    @property
    def generation_config(self) -> Any:
        return self.base.model.generation_config

    @property
    def dtype(self) -> torch.dtype:
        return self.base.model.dtype

    def without_adapter(self) -> "AdapterModel":
        """The base itself: what the adapter was at its beginning, at no cost in memory."""
        return AdapterModel(self.base, None)

    def merged(self) -> PreTrainedModel:
        """A whole model of its own with the adapter worked into the weights."""
        assert self.name is not None
        whole, _ = self.base.load()
        alone = SharedBase(lambda: (whole, self.base.tokenizer))
        alone.add(self.name, _config(whole, self._settings()), 0)
        twin = AdapterModel(alone, self.name, self.settings)
        twin.load_state_dict(self.state_dict())
        with torch.no_grad(), alone.active(self.name):
            for layer in alone.layers:
                layer.merge(adapter_names=[self.name])
        for path, module in list(whole.named_modules()):
            if isinstance(module, BaseTunerLayer):
                parent = whole.get_submodule(path.rpartition(".")[0])
                setattr(parent, path.rpartition(".")[2], module.get_base_layer())
        return whole

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT reads it. Equal adapters give equal bytes; where the base came from is left out."""
        assert self.name is not None
        folder.mkdir(parents=True, exist_ok=True)
        _config(self.base.model, self._settings()).save_pretrained(str(folder))
        tensors = self.adapter_weights()
        if empty := [key for key, tensor in tensors.items() if not tensor.numel()]:
            raise DataError(f"{folder}: the adapter's weight {empty[0]!r} is an empty tensor")
        save_file({key: t.detach().contiguous().cpu() for key, t in tensors.items()}, folder / WEIGHTS_FILE)

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter's weights under the names that PEFT gives them in files."""
        found = get_peft_model_state_dict(self.base.model, adapter_name=self.name or "")
        return {f"base_model.model.{key}": tensor for key, tensor in found.items()}

    def load_adapter(self, folder: Path) -> None:
        """Read what `save_adapter` wrote. Raises `DataError` for a file that does not fit."""
        try:
            tensors = load_file(folder / WEIGHTS_FILE)
        except Exception as error:  # safetensors raises its own class, derived from Exception alone
            raise DataError(f"{folder / WEIGHTS_FILE}: cannot be read ({error})") from error
        expected = {key: tensor.shape for key, tensor in self.adapter_weights().items()}
        if {key: tensor.shape for key, tensor in tensors.items()} != expected:
            raise DataError(f"{folder / WEIGHTS_FILE}: its weights are not those of such an adapter on this base model")
        plain = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}
        set_peft_model_state_dict(self.base.model, plain, adapter_name=self.name or "")

    def _settings(self) -> LoraSettings:
        assert self.settings is not None
        return self.settings


def adapter_models(count: int, settings: LoraSettings, load: Loader, seeds: list[int]) -> list[AdapterModel]:
    """`count` agents' models on one base (`share_base`) or each on a base of its own."""
    models: list[AdapterModel] = []
    base = SharedBase(load) if settings.share_base else None
    for index in range(count):
        own = base or SharedBase(load)
        own.add(f"agent_{index}", _config(own.model, settings), seeds[index])
        models.append(AdapterModel(own, f"agent_{index}", settings))
    return models


def as_model(model: AdapterModel) -> PreTrainedModel:
    """An adapter in the place of a model: it offers what agents use of one."""
    return cast(PreTrainedModel, model)


def _config(model: PreTrainedModel, settings: LoraSettings) -> LoraConfig:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    targets: Any = settings.targets
    if targets is None:
        kind = model.config.model_type
        if kind not in USUAL:
            raise ConfigError(f"lora.targets is needed: nothing is usual for models of type {kind!r}")
        targets = USUAL[kind]
    if not isinstance(targets, str):
        targets = sorted(targets)  # a set in PEFT's configuration: its order in files would be left to chance
    return LoraConfig(
        r=settings.r,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
