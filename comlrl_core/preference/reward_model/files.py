"""Where a reward model comes from and where it goes.

    reward_model/   config.json, model.safetensors (the backbone), tokenizer files
                    reward_head.safetensors        head [1, hidden] and shift, fp32
                    reward_model.json              number of agents, length, source

`AutoModel.from_pretrained` reads the folder's backbone. The same model gives the same bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.engine.processes import by_first
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import read_json, write_json
from comlrl_core.preference.reward_model.model import JointRewardModel
from comlrl_core.store import whole_folder
from comlrl_core.team.checkpoint import save_pretrained_folder
from comlrl_core.team.loading import load_backbone, load_model_and_tokenizer
from comlrl_core.team.scalar import backbone_of

SETTINGS_FILE = "reward_model.json"
HEAD_FILE = "reward_head.safetensors"
FOLDER = "reward_model"
_FORMAT = 1


def open_reward_model(
    source: str | PreTrainedModel,
    num_agents: int,
    *,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    head_seed: int = 0,
    max_length: int | None = None,
    model_config: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> JointRewardModel:
    """A reward model to fit.

    Args:
        source: a model name, a folder, `builtin:tiny`, `builtin:tiny-pretrained` or a loaded causal language model
            (whose weights are then trained); a folder of `save_reward_model` brings its head along.
        seed: initialises what is not in the files, as for an agent. `head_seed`: the head.
        max_length: most tokens of a joint text; None = the model's context.
        device: None = the GPU if there is one.

    Raises:
        ConfigError: the source cannot be loaded, or was fitted for another number of agents.
    """
    if isinstance(source, str) and (Path(source).expanduser() / SETTINGS_FILE).is_file():
        found = load_reward_model(Path(source).expanduser(), device=device, max_length=max_length)
        if found.num_agents != num_agents:
            raise ConfigError(
                f"the reward model {source!r} reads the texts of {found.num_agents} agents, not of {num_agents}"
            )
        return found.requires_grad_(True)
    model, own = load_model_and_tokenizer(source, tokenizer, model_config, seed, device)
    backbone = backbone_of(model)
    name = source if isinstance(source, str) else (getattr(source, "name_or_path", "") or type(source).__name__)
    return JointRewardModel(backbone, own, num_agents, max_length=max_length, seed=head_seed, source=name)


def save_reward_model(model: JointRewardModel, folder: Path | str) -> Path:
    """Write the model as a folder, complete or absent. Raises `DataError` when a weight is an empty tensor.

    Of several processes, all have to call it, and the first writes.
    """
    with gathered(model):
        return by_first(lambda: _save(model, Path(folder)))


def _save(model: JointRewardModel, target: Path) -> Path:
    with whole_folder(target) as staging:
        save_pretrained_folder(model.backbone, model.tokenizer, staging, "the reward model")
        head = {"head.weight": model.head.weight, "shift": model.shift}
        if not model.head.weight.numel():
            raise DataError("the reward model: the weight 'head.weight' is an empty tensor")
        save_file({name: t.detach().contiguous().cpu() for name, t in head.items()}, staging / HEAD_FILE)
        settings = {"format": _FORMAT, "num_agents": model.num_agents, "max_length": model.encoder.max_length}
        write_json(staging / SETTINGS_FILE, settings, indent=2)
    return target


def load_reward_model(
    folder: Path | str, *, device: str | torch.device | None = None, max_length: int | None = None
) -> JointRewardModel:
    """The model that `save_reward_model` wrote, frozen; `max_length` replaces the saved one.

    Raises `DataError` naming what is missing, empty, or does not fit.
    """
    path = Path(folder)
    settings = read_json(path / SETTINGS_FILE)
    if not isinstance(settings, dict) or settings.get("format") != _FORMAT:
        raise DataError(f"{path / SETTINGS_FILE}: not the settings of a reward model that this version reads")
    agents, length = settings.get("num_agents"), settings.get("max_length")
    if type(agents) is not int or agents < 1 or not (length is None or type(length) is int):
        raise DataError(f"{path / SETTINGS_FILE}: num_agents {agents!r} or max_length {length!r} is no count")
    backbone, tokenizer = load_backbone(path, device)
    model = JointRewardModel(backbone, tokenizer, agents, max_length=max_length or length, source=str(path))
    try:
        tensors = load_file(path / HEAD_FILE)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path / HEAD_FILE}: cannot be read ({error})") from error
    head, shift = tensors.get("head.weight"), tensors.get("shift")
    if head is None or shift is None or head.shape != model.head.weight.shape or shift.dim():
        shape = None if head is None else tuple(head.shape)
        raise DataError(
            f"{path / HEAD_FILE}: head.weight {shape} does not fit a backbone of {tuple(model.head.weight.shape)}"
        )
    for name, tensor in model.backbone.state_dict().items():
        if not tensor.numel():
            raise DataError(f"{path}: the weight {name!r} is an empty tensor")
    with torch.no_grad():
        model.head.weight.copy_(head)
        model.shift.copy_(shift)
    return model.requires_grad_(False)
