"""From settings and files to live objects: the oracle, the tasks and the team of an iteration.

The team that one stage leaves behind is kept, so that the next stage of the same process does not read it
again.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comlrl_core.algorithms.critic_setup import critic_optimizer, critic_sources, make_critics
from comlrl_core.algorithms.preference_learning import load_training_state, make_engines
from comlrl_core.comparators import Comparator, open_comparator
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.config.run import RunConfig
from comlrl_core.critics.building import renew_engines
from comlrl_core.critics.critics import Critics
from comlrl_core.critics.layout import FOLDER as CRITIC_FOLDER
from comlrl_core.engine.protocol import Engine
from comlrl_core.environments.tasks import read_tasks
from comlrl_core.rewards.loading import load_reward
from comlrl_core.rollout.transition import Transition
from comlrl_core.store import manifest_digest
from comlrl_core.team.checkpoint import load_team_folder
from comlrl_core.team.formatters import Formatter, resolve_formatters, text_formatters
from comlrl_core.team.team import Team, base_loader, load_team
from tasks.job import BUILTIN_TRANSITIONS, Job
from tasks.launching import in_rank
from tasks.oracle import oracle as oracle

logger = logging.getLogger(__name__)


@dataclass
class Live:
    """A team in memory with its engines, in the state that an iteration left behind."""

    team: Team
    engines: Sequence[Engine]
    environment_steps: int
    critics: Critics | None = None

    @property
    def critic_engines(self) -> Sequence[Engine]:
        return () if self.critics is None else self.critics.engines

    def reset_engines(self, config: RunConfig) -> None:
        """Forget all optimizer moments."""
        self.engines = make_engines(self.team, config.training)
        if self.critics is not None:
            renew_engines(self.critics, self.engines, critic_optimizer(config.critics()), config.training.engine)


_kept: dict[tuple[Path, str], Live] = {}


def settle(job: Job) -> None:
    """Bring this process into the state that the numbers depend on."""
    if job.config.training.num_threads is not None:
        torch.set_num_threads(job.config.training.num_threads)


def transition(job: Job) -> Transition | None:
    """What happens between turns; None where a rollout has one turn."""
    spec = job.config.tasks.transition
    if spec is None:
        return None
    target = BUILTIN_TRANSITIONS.get(spec, spec)
    func = load_reward(target, None, job.source_root, "tasks.transition").func
    passthrough = getattr(job.config.training, "external_prompt_passthrough", False)
    return Transition(func, passthrough)


def formatters(job: Job) -> list[Formatter]:
    """One formatter per agent, from templates and system prompts or from a Python function."""
    team, count = job.config.team, job.config.training.num_agents
    if team.formatter:
        return resolve_formatters(load_reward(team.formatter, None, job.source_root, "team.formatter").func, count)
    return text_formatters(count, team.templates, team.system_prompts)


def model_source(job: Job, source: str) -> str:
    """A folder relative to the project as an absolute one; names stay names."""
    folder = job.source_root / source
    return str(folder) if not source.startswith("builtin:") and folder.is_dir() else source


def load_models(job: Job, sources: Sequence[str], devices: Any) -> Team:
    """A frozen team of the models in `sources`, one per role, with this job's formatters."""
    shared = {source: model_source(job, source) for source in sources}
    team = load_team(
        agents=[shared[source] for source in sources],
        formatters=formatters(job),
        model_config=job.config.team.model_options,
        seed=job.config.training.seed,
        devices=devices,
        on_long_prompt=job.config.team.on_long_prompt,
    )
    return frozen(team)


def initial_team(job: Job) -> Team:
    """The team that the settings name, before any training."""
    team, training = job.config.team, job.config.training
    sources = team.agents or [team.agent_model or ""] * training.num_agents
    return load_team(
        agents=[model_source(job, source) for source in sources],
        formatters=formatters(job),
        model_config=team.model_options,
        seed=training.seed,
        devices=training.agent_devices,
        on_long_prompt=team.on_long_prompt,
        lora=training.lora,
    )


def reference(job: Job, team: Team) -> Team:
    """The run's first policies, frozen; of adapters on one base this is the base itself, which is in memory anyway."""
    training = job.config.training
    if training.lora is not None and training.reference_devices is None:
        return team.without_adapters()
    return policy(job, 0, training.reference_devices)


def policy(job: Job, iteration: int, devices: Any = None) -> Team:
    """A frozen team as `iteration` left it (0: the initial team), read from its folder."""
    return frozen(_read_policy(job, iteration, devices))


def _read_policy(job: Job, iteration: int, devices: Any) -> Team:
    options = {k: v for k, v in job.config.team.model_options.items() if k != "special_tokens"}  # saved with the model
    adapters = None
    if job.config.training.lora is not None:
        team = job.config.team
        source = model_source(job, (team.agents or [team.agent_model or ""])[0])
        place = devices[0] if isinstance(devices, list) else devices
        load = base_loader(source, None, team.model_options, job.config.training.seed, place)
        adapters = job.config.training.lora, load
    folder, on_long_prompt = job.store.policy(iteration), job.config.team.on_long_prompt
    return load_team_folder(folder, formatters(job), devices, on_long_prompt, options, adapters)


def frozen(team: Team) -> Team:
    """The same team, without gradients."""
    for model in team.unique_models:
        model.requires_grad_(False)
    return team


def live(job: Job, iteration: int) -> Live:
    """The team in training as `iteration` left it, with its optimizer; kept until `take` or another
    iteration.
    """
    key = (job.work_root, manifest_digest(job.store, iteration))
    if key not in _kept:
        forget()
        team = _read_policy(job, iteration, job.config.training.agent_devices)
        engines = make_engines(team, job.config.training)
        critics = _critics(job, iteration, team, engines) if job.config.needs_critic() else None
        left = Live(team, engines, 0, critics)
        left.environment_steps = load_training_state(
            job.store.training_state(iteration), engines, job.config.training, left.critic_engines
        )
        _kept[key] = left
    return _kept[key]


def _critics(job: Job, iteration: int, team: Team, engines: Sequence[Engine]) -> Critics:
    """Those that `iteration` left behind, or new ones where it left none (the initial team)."""
    folder = job.store.policy(iteration) / CRITIC_FOLDER
    config = job.config.critics()
    return make_critics(
        team,
        engines,
        config,
        critic_models(job),
        model_config=job.config.team.model_options,
        folder=folder if folder.is_dir() else None,
    )


def critic_models(job: Job) -> list[str]:
    """What each critic with a model of its own starts from, as `ConfigError`s and all say in the settings' words."""
    sources = critic_sources(
        job.config.critics(),
        [model_source(job, name) for name in job.config.team.agents or [job.config.team.agent_model or ""]],
        job.config.training.num_agents,
    )
    return [model_source(job, str(source)) for source in sources]


def sampling_team(job: Job, iteration: int) -> Team:
    """The team that `iteration` left behind, to sample from.

    In one process it is the one in training. Processes that a stage started for its sampling have no use for an
    optimizer: there it is frozen.
    """
    if not in_rank():
        return live(job, iteration).team
    key = (job.work_root, manifest_digest(job.store, iteration))
    if key not in _sampling:
        _sampling.clear()
        _sampling[key] = policy(job, iteration, job.config.training.agent_devices)
    return _sampling[key]


_sampling: dict[tuple[Path, str], Team] = {}


def is_live(job: Job, iteration: int) -> bool:
    """Whether the team of `iteration` is in memory already."""
    return (job.work_root, manifest_digest(job.store, iteration)) in _kept


def take(job: Job, iteration: int) -> Live:
    """Like `live`, for a stage that changes the team: nobody else sees it any more."""
    taken = live(job, iteration)
    _kept.clear()
    return taken


def keep(job: Job, iteration: int, left: Live) -> None:
    """Keep the team that `iteration` has just published."""
    _kept.clear()
    _kept[(job.work_root, manifest_digest(job.store, iteration))] = left


def forget() -> None:
    """Let go of the kept teams and their memory."""
    release_comparator()
    _kept.clear()
    gc.collect()


def comparator(job: Job, iteration: int) -> Comparator | None:
    """The other side of `iteration`, opened once for all chunks of its collection; `release_comparator` lets go of it.

    None for the offline algorithm, which compares the team's own candidates.
    """
    training = job.config.training
    if not isinstance(training, ComparatorFields):
        return None
    key = (job.work_root, manifest_digest(job.store, iteration - 1))
    if key not in _comparators:
        release_comparator()
        _comparators[key] = open_comparator(
            training,
            sampling_team(job, iteration - 1),
            iteration,
            lambda index: policy(job, index, training.comparator_devices),
            lambda sources: load_models(job, sources, training.comparator_devices),
        )
    return _comparators[key]


_comparators: dict[tuple[Path, str], Comparator] = {}


def release_comparator() -> None:
    """Let go of the other side and of its memory; the next collection opens its own."""
    for opened in _comparators.values():
        opened.release()
    _comparators.clear()


def train_tasks(job: Job) -> list[dict[str, Any]]:
    """The training tasks that `prepare` wrote."""
    return read_tasks(job.train_tasks)


def eval_tasks(job: Job) -> list[dict[str, Any]]:
    """The held-out tasks that `prepare` wrote (none: an empty list)."""
    return read_tasks(job.eval_tasks)
