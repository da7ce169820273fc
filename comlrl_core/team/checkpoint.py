"""A team on disk: one plain Hugging Face folder per agent, complete or absent.

    models/iteration_0001/agent_0/   config.json, model.safetensors, generation_config.json, tokenizer files
    models/iteration_0001/agent_1/
    models/iteration_0001/team.json  which agents share one model

Any tool that serves a Hugging Face folder serves an agent as it is. The same team gives the same bytes,
wherever it is written and wherever its models came from.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.config.lora import LoraSettings
from comlrl_core.engine.processes import by_first
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import DataError
from comlrl_core.team.adapters import CONFIG_FILE, AdapterModel, Loader, adapter_models, as_model
from comlrl_core.team.agent import Agent, make_agent
from comlrl_core.team.formatters import FormatterSpec, resolve_formatters
from comlrl_core.team.loading import load_model_and_tokenizer, quiet_transformers
from comlrl_core.team.team import Team, _per_agent

TEAM_FILE = "team.json"
AGENT_PREFIX = "agent_"
# What Transformers writes about where files came from; it differs between runs that hold the same weights.
ORIGIN_KEYS = ("_name_or_path", "name_or_path", "is_local", "local_files_only")


def save_team(team: Team, directory: Path | str) -> Path:
    """Write every agent's folder under `directory` and return it.

    All is written beside it, checked, flushed to disk and renamed into place. What else the directory holds
    (a reward model, say) is kept; agents that were there are replaced. Raises `DataError` when a weight is an
    empty tensor. Of several processes, all have to call it, and the first writes.
    """
    with gathered(*team.models):
        return by_first(lambda: save_agents(team, Path(directory)))


def save_agents(team: Team, target: Path) -> Path:
    """`save_team` of whole weights, by the process that calls it."""
    for agent in team.agents:
        _refuse_empty(agent.model.state_dict().items(), f"agent {agent.index}")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        fresh = aside / "new"
        fresh.mkdir()
        for agent in team.agents:
            path = fresh / f"{AGENT_PREFIX}{agent.index}"
            save_pretrained_folder(agent.model, agent.tokenizer, path, f"agent {agent.index}")
        first = {id(model): index for index, model in reversed(list(enumerate(team.models)))}
        sharing = [first[id(model)] for model in team.models]
        _write_json(fresh / TEAM_FILE, {"num_agents": team.num_agents, "model_of_agent": sharing})
        if target.exists():
            for entry in target.iterdir():
                if not entry.name.startswith(AGENT_PREFIX) and entry.name != TEAM_FILE:
                    _copy(entry, fresh / entry.name)
        _flush(fresh)
        if target.exists():
            target.rename(aside / "old")
        fresh.rename(target)
        _flush_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def load_team_folder(
    directory: Path | str,
    formatters: FormatterSpec | Sequence[FormatterSpec] = None,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    on_long_prompt: str = "fail",
    model_config: dict[str, Any] | None = None,
    adapters: tuple[LoraSettings, Loader] | None = None,
) -> Team:
    """The team that `save_team` wrote; agents that shared a model share it again.

    A folder without `team.json` (agents saved by hand) loads too: every `agent_*` in it is an agent of its
    own. Adapters need their settings and their base (`adapters`: `Team.adapters` of such a team). Raises
    `DataError` naming a folder or file that is missing or does not fit.
    """
    folder = Path(directory)
    sharing = _read_sharing(folder)
    places = _per_agent(devices, len(sharing), "devices")
    agents: list[Agent] = []
    has_adapters = (folder / f"{AGENT_PREFIX}0" / CONFIG_FILE).is_file()
    if adapters is not None and not has_adapters:
        raise DataError(f"{folder}: holds whole models, and adapters were asked for (lora)")
    if has_adapters:
        return _load_adapters(folder, len(sharing), formatters, on_long_prompt, adapters)
    for index, owner in enumerate(sharing):
        path = folder / f"{AGENT_PREFIX}{index}"
        if not (path / "config.json").is_file():
            raise DataError(f"{path}: no model of agent {index} here (config.json is missing)")
        source: str | PreTrainedModel = str(path) if owner == index else agents[owner].model
        options = model_config if owner == index else None
        model, tokenizer = load_model_and_tokenizer(source, str(path), options, device=places[owner])
        agents.append(make_agent(index, model, tokenizer, str(path)))
    return Team(agents, resolve_formatters(formatters, len(agents)), on_long_prompt)


def _load_adapters(
    folder: Path,
    count: int,
    formatters: FormatterSpec | Sequence[FormatterSpec],
    on_long_prompt: str,
    adapters: tuple[LoraSettings, Loader] | None,
) -> Team:
    if adapters is None:
        raise DataError(f"{folder}: holds adapters, and the base model that they belong to was not named (lora)")
    settings, load = adapters
    models = adapter_models(count, settings, load, [0] * count)
    agents = []
    for index, model in enumerate(models):
        path = folder / f"{AGENT_PREFIX}{index}"
        model.load_adapter(path)
        agents.append(make_agent(index, as_model(model), model.base.tokenizer, str(path)))
    return Team(agents, resolve_formatters(formatters, count), on_long_prompt)


def save_merged(team: Team, directory: Path | str) -> Path:
    """Write a team of adapters as whole models, one Hugging Face folder per agent, for tools that know no adapters."""
    agents = []
    for agent in team.agents:
        model = cast(object, agent.model)
        whole = model.merged() if isinstance(model, AdapterModel) else agent.model
        agents.append(make_agent(agent.index, whole, agent.tokenizer, agent.source))
    return save_team(Team(agents, team.formatters, team.on_long_prompt), directory)


def digest_folder(directory: Path | str) -> str:
    """SHA-256 over the sorted relative names and the contents of all files under a folder."""
    folder = Path(directory)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    digest = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(files):
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
        with files[name].open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def save_pretrained_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, who: str) -> None:
    """Write a model and its tokenizer into the folder `path`, without what differs between equal runs.

    `who` starts the `DataError` about a weight that is empty, in memory or in what was written.
    """
    _refuse_empty(model.state_dict().items(), who)
    own = cast(object, model)
    if isinstance(own, AdapterModel):
        own.save_adapter(path)
        with quiet_transformers():
            tokenizer.save_pretrained(path)
        _forget_origin(path / "tokenizer_config.json")
        return
    with quiet_transformers(), _without_needless_imports():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    for name in ("config.json", "tokenizer_config.json"):
        _forget_origin(path / name)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DataError(f"{who}: its model wrote no safetensors file, so it cannot be loaded again")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        empty = [name for name, shape in shapes.items() if 0 in shape]
        if empty or not shapes:
            raise DataError(f"{who}: {file.name} holds no weights for {', '.join(empty) or 'anything'}")


@contextmanager
def _without_needless_imports() -> Iterator[None]:
    """Saving asks Accelerate whether the model is DeepSpeed's wrapper, and that imports DeepSpeed to know it."""
    try:
        from accelerate.utils import other
    except ImportError:
        yield
        return
    asks = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
    try:
        yield
    finally:
        other.is_deepspeed_available = asks


def _refuse_empty(tensors: Any, who: str) -> None:
    for name, tensor in tensors:
        if tensor.numel() == 0:
            raise DataError(
                f"{who}: the weight {name!r} is an empty tensor (a sharded model must be gathered before it is saved)"
            )


def _forget_origin(file: Path) -> None:
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        kept = {key: value for key, value in content.items() if key not in ORIGIN_KEYS}
        if kept != content:
            _write_json(file, kept)


def _read_sharing(folder: Path) -> list[int]:
    """Entry `i` is the agent whose model agent `i` uses: `i` itself, or an earlier one."""
    if not folder.is_dir():
        raise DataError(f"there is no team folder {folder}")
    file = folder / TEAM_FILE
    if not file.is_file():
        count = sum(1 for path in folder.glob(f"{AGENT_PREFIX}*") if path.is_dir())
        if count == 0:
            raise DataError(f"{folder}: no agents here (expected {AGENT_PREFIX}0, {AGENT_PREFIX}1, ...)")
        return list(range(count))
    try:
        sharing = json.loads(file.read_text(encoding="utf-8"))["model_of_agent"]
        valid = all(
            type(owner) is int and 0 <= owner <= i and sharing[owner] == owner for i, owner in enumerate(sharing)
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file}: not a team file ({error})") from error
    if not sharing or not valid:
        raise DataError(f"{file}: model_of_agent must name an agent up to itself for each agent, not {sharing!r}")
    return list(sharing)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            _flush_folder(path)
        elif not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
