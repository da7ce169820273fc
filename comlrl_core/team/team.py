"""`Team`: the one object that knows how many agents there are, where they live and how they speak."""

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.config.lora import LoraSettings
from comlrl_core.engine.processes import put_together, share
from comlrl_core.engine.weights import gathered, is_sharded
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.progress import progress as progress_bar
from comlrl_core.randomness import torch_seed
from comlrl_core.team.adapters import AdapterModel, Loader, adapter_models, as_model
from comlrl_core.team.agent import Agent, make_agent
from comlrl_core.team.formatters import Formatter, FormatterSpec, render, resolve_formatters
from comlrl_core.team.generation import Generation, Sampling, generate
from comlrl_core.team.loading import load_model_and_tokenizer

Samples = list[list[Generation]]

ON_LONG_PROMPT = ("fail", "truncate_left")
DEFAULT_NUM_AGENTS = 2

logger = logging.getLogger(__name__)


class Team:
    """Agents with their formatters. Two agents may share one model object; it then has one set of weights.

    `on_long_prompt`: what happens to a prompt that leaves no room for the completion in the model's context:
    `fail` (a `DataError` naming it) or `truncate_left` (its oldest tokens go; `truncated_prompts` counts the
    cut ones).
    """

    def __init__(self, agents: Sequence[Agent], formatters: Sequence[Formatter], on_long_prompt: str = "fail") -> None:
        if not agents:
            raise ConfigError("a team needs at least one agent")
        if on_long_prompt not in ON_LONG_PROMPT:
            raise ConfigError(f"on_long_prompt must be one of {', '.join(ON_LONG_PROMPT)}, not {on_long_prompt!r}")
        if len(formatters) != len(agents):
            raise ConfigError(f"{len(formatters)} formatters for {len(agents)} agents")
        self.agents = tuple(agents)
        self.formatters = tuple(formatters)
        self.on_long_prompt = on_long_prompt
        self.truncated_prompts = 0

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def models(self) -> list[PreTrainedModel]:
        """One entry per agent; shared models come more than once."""
        return [agent.model for agent in self.agents]

    @property
    def unique_models(self) -> list[PreTrainedModel]:
        """Every model object once, in the order of its first agent."""
        return list({id(model): model for model in self.models}.values())

    @property
    def adapters(self) -> tuple[LoraSettings, Loader] | None:
        """How the agents' adapters are made, and how their base is loaded; None where agents are whole models."""
        first = cast(object, self.agents[0].model)
        if not isinstance(first, AdapterModel) or first.settings is None:
            return None
        return first.settings, first.base.load

    def without_adapters(self) -> "Team":
        """The team that the adapters started from, on the same base: a reference that takes no memory."""
        models = [cast(AdapterModel, model).without_adapter() for model in self.models]
        agents = [
            make_agent(agent.index, as_model(model), agent.tokenizer, agent.source)
            for agent, model in zip(self.agents, models, strict=True)
        ]
        return Team(agents, self.formatters, self.on_long_prompt)

    @property
    def pad_ids(self) -> list[int]:
        return [agent.pad_id for agent in self.agents]

    def prompts(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The rendered prompt of every agent for one task's row."""
        return tuple(
            render(agent.tokenizer, formatter(row))
            for agent, formatter in zip(self.agents, self.formatters, strict=True)
        )

    def encode(self, prompt: str, agent: int, max_new_tokens: int, task: int | str = "") -> list[int]:
        """Ids of a rendered prompt of agent `agent` that leave room for `max_new_tokens` in its context.

        Raises `DataError` naming task, agent and lengths when it is empty, or too long under
        `on_long_prompt="fail"`.
        """
        member = self.agents[agent]
        ids = member.encode_prompt(prompt)
        where = f"task {task}, agent {agent}" if task != "" else f"agent {agent}"
        if not ids:
            raise DataError(f"{where}: the prompt is empty; a model needs at least one token to continue from")
        if member.context_length is None or len(ids) + max_new_tokens <= member.context_length:
            return ids
        kept = member.context_length - max_new_tokens
        prefix = len(member.prefix_ids) if tuple(ids[: len(member.prefix_ids)]) == member.prefix_ids else 0
        if self.on_long_prompt == "fail" or kept <= prefix:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens and max_new_tokens is {max_new_tokens}, "
                f"together more than the model's context of {member.context_length}; shorten one of them"
                + ("" if kept <= prefix else ", or set on_long_prompt to truncate_left")
            )
        self.truncated_prompts += 1
        return ids[:prefix] + ids[len(ids) - (kept - prefix) :]  # the BOS stays in front

    def decode(self, token_ids: Sequence[int], agent: int) -> str:
        """The text of agent `agent`'s completion, without special tokens."""
        return self.agents[agent].decode(token_ids)

    def generate(
        self,
        prompts: Sequence[tuple[str, ...]],
        num_candidates: int,
        sampling: Sampling,
        keys: Callable[[int, int, int], int],
        tokens_per_batch: int | None = None,
        progress: str | None = None,
    ) -> list[list[tuple[Generation, ...]]]:
        """`[task][candidate][agent]`: `num_candidates` joint responses to every task, one `generate` call per
        agent.

        `prompts[task][agent]` are rendered prompts; `keys(task, agent, candidate)` gives the stream of a
        sample. `progress` names a progress bar over all samples.
        """
        for task, row in enumerate(prompts):
            if len(row) != self.num_agents:
                raise DataError(f"task {task} has {len(row)} prompts for {self.num_agents} agents")
        # All of them first, so that a prompt which does not fit stops the stage before it has cost anything.
        encoded = [
            [self.encode(row[agent], agent, sampling.max_new_tokens, task) for task, row in enumerate(prompts)]
            for agent in range(self.num_agents)
        ]
        mine = share(range(len(prompts)))  # tasks; the other processes answer the rest
        total = len(mine) * num_candidates * self.num_agents
        with ExitStack() as stack:
            stack.enter_context(gathered(*self.models))
            bar = stack.enter_context(progress_bar(progress, total, "sample")) if progress else None

            def samples_of(agent: int) -> list[list[Generation]]:
                member = self.agents[agent]
                return generate(
                    member.model,
                    [encoded[agent][t] for t in mine],
                    num_samples=num_candidates,
                    sampling=sampling,
                    keys=[[keys(t, agent, k) for k in range(num_candidates)] for t in mine],
                    eos_ids=member.eos_ids,
                    pad_id=member.pad_id,
                    tokens_per_batch=tokens_per_batch,
                    on_progress=bar.update if bar is not None else None,
                )

            per_agent = _for_each(samples_of, [agent.device for agent in self.agents])
        own = [
            [tuple(samples[place][k] for samples in per_agent) for k in range(num_candidates)]
            for place in range(len(mine))
        ]
        return put_together(own, len(prompts))

    def fingerprint(self) -> str:
        """SHA-256 over the weights of every agent in order: names, types, shapes and bytes."""
        digest = hashlib.sha256()
        known: dict[int, bytes] = {}
        for model in self.models:
            if id(model) not in known:
                with gathered(model):
                    known[id(model)] = _weights_digest(model)
            digest.update(known[id(model)])
        return digest.hexdigest()

    def copy(self, devices: str | torch.device | Sequence[str | torch.device] | None = None) -> "Team":
        """A frozen team with its own copy of the weights; shared models stay shared.

        `devices`: one for all or one per agent; None leaves each copy where its original is.
        """
        places = _per_agent(devices, self.num_agents, "devices")
        copies: dict[int, PreTrainedModel] = {}
        memo: dict[int, Any] = {}  # adapters that share a base share its copy
        agents = []
        for agent, place in zip(self.agents, places, strict=True):
            if id(agent.model) not in copies:
                twin = _plain_copy(agent.model, memo).eval().requires_grad_(False)
                copies[id(agent.model)] = twin if place is None else twin.to(torch.device(place))
            agents.append(make_agent(agent.index, copies[id(agent.model)], agent.tokenizer, agent.source))
        return Team(agents, self.formatters, self.on_long_prompt)


def load_team(
    *,
    agent_model: str | PreTrainedModel | None = None,
    agents: Sequence[str | PreTrainedModel] | None = None,
    num_agents: int | None = None,
    tokenizer: str | PreTrainedTokenizerBase | Sequence[str | PreTrainedTokenizerBase] | None = None,
    formatters: FormatterSpec | Sequence[FormatterSpec] = None,
    model_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    on_long_prompt: str = "fail",
    lora: LoraSettings | None = None,
) -> Team:
    """A team from one source for all agents (`agent_model`) or one source per agent (`agents`).

    Names and folders give every agent weights of its own; the same model object given twice stays one, so its
    agents share parameters. `num_agents` defaults to the length of `agents`, to 1 for a loaded `agent_model`,
    else to 2. `tokenizer` and `devices` are one for all or one per agent. Tiny models differ between agents:
    each is initialised from its own stream of `seed`. With `lora`, each agent is an adapter on the source, which
    is loaded once (`share_base`) or for each. Raises `ConfigError` when explicitly given counts
    disagree or a source cannot be loaded.
    """
    sources = _sources(agent_model, agents, num_agents)
    count = len(sources)
    resolved = resolve_formatters(formatters, count)
    tokenizers = _per_agent(tokenizer, count, "tokenizers")
    places = _per_agent(devices, count, "devices")
    if lora is not None:
        return Team(_adapted(sources, lora, tokenizers, model_config, seed, places), resolved, on_long_prompt)
    seen: dict[int, int] = {}
    members: list[Agent] = []
    for index, source in enumerate(sources):
        if isinstance(source, PreTrainedModel):
            first = seen.setdefault(id(source), index)
            if first != index:
                logger.info("agents %d and %d share one model: one set of weights, one optimizer", first, index)
                if tokenizers[index] is None:
                    tokenizers[index] = members[first].tokenizer
        own_seed = torch_seed("team", "initial weights", seed, index)
        model, own = load_model_and_tokenizer(source, tokenizers[index], model_config, own_seed, places[index])
        name = source if isinstance(source, str) else (getattr(source, "name_or_path", "") or type(source).__name__)
        members.append(make_agent(index, model, own, name))
    return Team(members, resolved, on_long_prompt)


def _adapted(
    sources: Sequence[str | PreTrainedModel],
    lora: LoraSettings,
    tokenizers: Sequence[Any],
    model_config: Mapping[str, Any] | None,
    seed: int,
    places: Sequence[Any],
) -> list[Agent]:
    if any(source != sources[0] for source in sources) or not isinstance(sources[0], str):
        raise ConfigError("lora needs one name or folder as the base of all agents' adapters (agent_model)")
    load = base_loader(sources[0], tokenizers[0], model_config, seed, places[0])
    seeds = [torch_seed("team", "adapter", seed, index) for index in range(len(sources))]
    models = adapter_models(len(sources), lora, load, seeds)
    return [make_agent(i, as_model(model), model.base.tokenizer, sources[0]) for i, model in enumerate(models)]


def _for_each(work: Callable[[int], Samples], devices: Sequence[torch.device]) -> list[Samples]:
    """`work` of every agent; agents on one device one after the other, devices at the same time."""
    places: dict[torch.device, list[int]] = {}
    for agent, device in enumerate(devices):
        places.setdefault(device, []).append(agent)
    if len(places) == 1:
        return [work(agent) for agent in range(len(devices))]
    found: dict[int, Samples] = {}
    with ThreadPoolExecutor(len(places)) as pool:
        for done in pool.map(lambda agents: {agent: work(agent) for agent in agents}, places.values()):
            found |= done
    return [found[agent] for agent in range(len(devices))]


def base_loader(
    source: str, tokenizer: Any, model_config: Mapping[str, Any] | None, seed: int, device: Any = None
) -> Loader:
    """Loads the base of a team's adapters: the same weights each time."""
    own_seed = torch_seed("team", "initial weights", seed, 0)
    return lambda: load_model_and_tokenizer(source, tokenizer, model_config, own_seed, device)


def _sources(
    agent_model: str | PreTrainedModel | None,
    agents: Sequence[str | PreTrainedModel] | None,
    num_agents: int | None,
) -> list[str | PreTrainedModel]:
    if (agent_model is None) == (agents is None):
        given = "neither" if agents is None else "both"
        raise ConfigError(f"give either agent_model (one for all) or agents (one per agent), not {given}")
    if num_agents is not None and num_agents < 1:
        raise ConfigError(f"num_agents must be at least 1, not {num_agents}")
    if agents is not None:
        if isinstance(agents, str) or not agents:
            raise ConfigError(f"agents must be a list with one model per agent, not {agents!r}")
        if num_agents is not None and num_agents != len(agents):
            raise ConfigError(f"agents lists {len(agents)} models, but num_agents is {num_agents}")
        return list(agents)
    assert agent_model is not None
    if isinstance(agent_model, str):
        return [agent_model] * (DEFAULT_NUM_AGENTS if num_agents is None else num_agents)
    if num_agents not in (None, 1):
        raise ConfigError(
            f"a loaded agent_model is one agent, but num_agents is {num_agents}: "
            "pass agents=[...] with one model per agent "
            "(the same object twice shares its weights), or a name or folder"
        )
    return [agent_model]


def _per_agent(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{len(value)} {what} for {count} agents: give one for all, or one per agent")
    return list(value)


def _plain_copy(model: PreTrainedModel, memo: dict[int, Any]) -> PreTrainedModel:
    """A copy with whole weights of its own, whichever engine trains `model`."""
    if not is_sharded(model):
        return copy.deepcopy(model, memo)
    twin: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    twin.generation_config = copy.deepcopy(model.generation_config)
    with gathered(model):
        twin.to(model.dtype).load_state_dict(model.state_dict())  # type: ignore[arg-type]
    return twin


def _weights_digest(model: PreTrainedModel) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
