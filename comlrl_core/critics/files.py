"""Where critics come from and where they go.

    critic/            a central critic, or critic/agent_0/, critic/agent_1/ ... one per agent:
        config.json, model.safetensors, tokenizer files     the backbone, where the critic has one of its own
        value_head.safetensors                              the head, fp32
        critic.json                                         what it reads

`AutoModel.from_pretrained` reads the backbone. The same critic gives the same bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.critics.critic import CriticModel, SeparateCritic, SharedCritic
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.layout import FORMAT, HEAD_FILE, SETTINGS_FILE, critic_folder, read_settings
from comlrl_core.engine.processes import by_first
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import DataError
from comlrl_core.files import write_json
from comlrl_core.store import whole_folder
from comlrl_core.team.checkpoint import save_pretrained_folder
from comlrl_core.team.loading import load_backbone, load_model_and_tokenizer
from comlrl_core.team.scalar import ScalarHead, backbone_of


def open_critic_model(
    source: str | PreTrainedModel,
    *,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    hidden_dim: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    head_seed: int = 0,
    model_config: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> CriticModel:
    """A critic's model to train.

    Args:
        source: a model name, a folder, `builtin:tiny` or a loaded causal language model; a folder of `save_critics`
            brings its head along.
        hidden_dim: hidden layer of a new head; None = linear.
        max_length: most tokens of an input; None = the model's context.
        seed: initialises what is not in the files, as for an agent. `head_seed`: a new head.
        device: None = the GPU if there is one.

    Raises:
        ConfigError: the source cannot be loaded. DataError: a saved critic is damaged.
    """
    folder = Path(source).expanduser() if isinstance(source, str) else None
    if folder is not None and (folder / SETTINGS_FILE).is_file():
        backbone, own = load_backbone(folder, device)
        saved = read_settings(folder)
        head = ScalarHead(backbone, saved["hidden_dim"], 0)
        load_head(head, folder)
        model = CriticModel(backbone, own, head, max_length=max_length or saved["max_length"], source=str(folder))
        return model.requires_grad_(True)
    loaded, own = load_model_and_tokenizer(source, tokenizer, model_config, seed, device)
    backbone = backbone_of(loaded)
    name = source if isinstance(source, str) else (getattr(source, "name_or_path", "") or type(source).__name__)
    return CriticModel(backbone, own, ScalarHead(backbone, hidden_dim, head_seed), max_length=max_length, source=name)


def save_critics(critics: Critics, folder: Path | str) -> Path:
    """Write every critic below `folder`, complete or absent. Raises `DataError` when a weight is an empty tensor.

    Of several processes, all have to call it, and the first writes.
    """
    with gathered(*(critic.modules[0] for critic in critics.critics)):
        return by_first(lambda: _save(critics, Path(folder)))


def _save(critics: Critics, target: Path) -> Path:
    with whole_folder(target) as staging:
        for index, critic in enumerate(critics.critics):
            place = critic_folder(staging, critics.central, index)
            place.mkdir(exist_ok=True)
            settings: dict[str, Any] = {"format": FORMAT, "max_length": None}
            if isinstance(critic, SeparateCritic):
                save_pretrained_folder(critic.model.backbone, critic.model.tokenizer, place, f"critic {index}")
                settings["max_length"] = critic.model.encoder.max_length
                head: nn.Module = critic.model.head
            else:
                assert isinstance(critic, SharedCritic)
                head = critic.head
            assert isinstance(head, ScalarHead)
            save_head(head, place)
            write_json(place / SETTINGS_FILE, settings | {"hidden_dim": head.hidden_dim}, indent=2)
    return target


def save_head(head: ScalarHead, folder: Path) -> None:
    """Write a head's weights."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in head.state_dict().items()}
    if empty := [name for name, tensor in tensors.items() if not tensor.numel()]:
        raise DataError(f"{folder / HEAD_FILE}: the weight {empty[0]!r} is an empty tensor")
    save_file(tensors, folder / HEAD_FILE)


def load_head(head: ScalarHead, folder: Path) -> None:
    """Read a head's weights into `head`. Raises `DataError` naming what is missing or does not fit."""
    path = folder / HEAD_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise DataError(f"{path}: its weights {found} do not fit this critic's head {expected}")
    head.load_state_dict(tensors)
