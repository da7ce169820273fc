"""What can be known to fail is refused before anything is written: settings, task files, models, devices, user's code.

Nothing here imports PyTorch or Transformers unless a setting needs them (a GPU's name, model options), asks a network,
or writes. Files that an earlier run left are looked at in `leftovers.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from comlrl_core.config.devices import check_device, named_devices
from comlrl_core.config.fields import ComparatorFields
from comlrl_core.environments.sets import below, task_sets
from comlrl_core.environments.tasks import BUILTIN_PREFIX, locate_tasks, needs_datasets
from comlrl_core.errors import ComlrlError, ConfigError, DataError
from comlrl_core.rewards.loading import load_reward
from comlrl_core.team.formatters import (
    Formatter,
    is_messages,
    resolve_formatters,
    template_fields,
    text_formatters,
)
from comlrl_core.team.sources import check_source, context_limit, has_chat_template
from flows import pipeline
from flows.leftovers import check_leftovers
from flows.package_lock import check_readable
from flows.yaml_edit import parse, read
from tasks.job import BUILTIN_TRANSITIONS, Job
from tasks.oracle import oracle

FORMATTED_ROWS = 8  # how many rows of each task set a Python formatter is tried on

Rows = list[dict[str, Any]]


def check(job: Job, source: str | Path = "settings", *, stage: str | None = None, iteration: int = 0) -> None:
    """Refuse what would end this job later. Writes nothing.

    `source` is what the settings came from, for messages. `stage` (and `iteration`, where it has one) limits the check
    to what that stage of the pipeline uses. Raises `ConfigError` naming source, setting and what is allowed, or
    `DataError` naming file and line or field.
    """
    check_settings(job, source, stage)
    if stage is None or stage == "evaluate":
        check_leftovers(job, job.config.num_iterations)
    elif stage in ("iterate", "train"):
        check_leftovers(job, iteration - 1)


def check_settings(job: Job, source: str | Path = "settings", stage: str | None = None) -> None:
    """The part of `check` that looks at the settings and at the files that they name."""
    with _named(source):
        if job.config.reward.processor:
            with _named("reward.processor"):
                load_reward(job.config.reward.processor, None, job.source_root, "reward.processor")
        oracle(job)
        between = job.config.tasks.transition
        if between:
            load_reward(BUILTIN_TRANSITIONS.get(between, between), None, job.source_root, "tasks.transition")
    _check_devices(job, source)
    initial = stage in (None, "prepare")
    rows = _task_rows(job, source) if initial else {}
    agents = job.config.team.agents or [job.config.team.agent_model or ""] * job.config.training.num_agents
    compared = _compared(job)
    if initial:
        field = "team.agents" if job.config.team.agents else "team.agent_model"
        _check_models(job, source, field, agents, known_offline=job.store.has(0))
    field = "training.comparator_agents" if _training(job, "comparator_agents") else "training.comparator_model_name"
    _check_models(job, source, field, compared)
    for field, longest in (("reward_model_name", "reward_max_length"), ("critic_model_name", "critic_max_length")):
        _check_base(job, source, field, longest)
    if job.config.team.model_options:
        _check_options(job, source, [*agents, *compared])
    _check_prompts(job, source, rows, [*(agents if initial else []), *compared])
    if stage is None and job.work_root == job.source_root and pipeline.is_tracked(job.work_root):
        _check_pipeline(job)


def _training(job: Job, name: str) -> Any:
    return getattr(job.config.training, name, None)


def _compared(job: Job) -> list[str]:
    training = job.config.training
    if not isinstance(training, ComparatorFields) or training.comparator_policy != "model":
        return []
    return training.comparator_agents or [training.comparator_model_name or ""]


# ---- devices ---------------------------------------------------------------------------------------------------------


def _check_devices(job: Job, source: str | Path) -> None:
    for field, names in named_devices(job.config.training):
        for name in names:
            with _named(source, f"training.{field}"):
                check_device(name)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _task_rows(job: Job, source: str | Path) -> dict[str, Rows]:
    """The rows of those task sets that can be read here, by setting; names of data sets are not fetched."""
    tasks = job.config.tasks
    named = {"tasks.train": tasks.train} | ({} if tasks.eval is None else {"tasks.eval": tasks.eval})
    readable: dict[str, str] = {}
    for field, name in named.items():
        with _named(source, field):
            if not needs_datasets(below(job.source_root, name)):
                readable[field] = name
    if not readable:
        return {}
    # One of the two may be a data set's name: then the other is read alone.
    train, held_out = readable.get("tasks.train"), readable.get("tasks.eval")
    with _named(source, " and ".join(readable)):
        numbers = (tasks.num_train, tasks.num_eval, tasks.seed, job.source_root)
        if train is None:
            rows, _ = task_sets(held_out or "", None, tasks.num_eval, *numbers[1:])
            return {"tasks.eval": rows}
        training, evaluation = task_sets(train, held_out, *numbers)
    return {"tasks.train": training} | ({"tasks.eval": evaluation} if held_out is not None else {})


def _place(job: Job, field: str, index: int) -> str:
    """Where a row stands: file and line, or the task set's name."""
    name = getattr(job.config.tasks, field.removeprefix("tasks."))
    if name.startswith(BUILTIN_PREFIX):
        return name
    return locate_tasks(below(job.source_root, name), index + 1)[index][0]


# ---- models ----------------------------------------------------------------------------------------------------------


def _located(job: Job, name: str) -> str:
    folder = job.source_root / name
    return str(folder) if not name.startswith(BUILTIN_PREFIX) and folder.is_dir() else name


def _check_models(
    job: Job, source: str | Path, field: str, names: Sequence[str], *, known_offline: bool = False
) -> None:
    """`known_offline`: the initial team was saved already, so that a hub's model need not be in the cache any more."""
    room = job.config.training.max_new_tokens
    for name in dict.fromkeys(names):
        located = _located(job, name)
        with _named(source, field):
            check_source(located, job.config.team.model_options, look_in_cache=not known_offline)
        limit = None if "max_position_embeddings" in job.config.team.model_options else context_limit(located)
        if limit is not None and room >= limit:
            raise ConfigError(
                f"{source}: training.max_new_tokens: {room} leaves no room for a prompt in the context of {name!r}, "
                f"{limit} tokens; allowed: less than {limit}"
            )


def _check_base(job: Job, source: str | Path, field: str, longest: str) -> None:
    """The base of a reward model or of critics is there, and as long as the settings want it to be."""
    name, length = _training(job, field), _training(job, longest)
    if not name:
        return
    located = _located(job, name)
    with _named(source, f"training.{field}"):
        check_source(located)
    limit = context_limit(located)
    if limit is not None and length is not None and length > limit:
        raise ConfigError(f"{source}: training.{longest}: {length} is above the context of {name!r}, {limit} tokens")


def _check_options(job: Job, source: str | Path, names: Sequence[str]) -> None:
    from comlrl_core.team.loading import check_options

    with _named(source, "team.model_options"):
        for name in dict.fromkeys(names):
            check_options(_located(job, name), job.config.team.model_options)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _check_prompts(job: Job, source: str | Path, rows: Mapping[str, Rows], names: Sequence[str]) -> None:
    """The formatter loads and every prompt can be made: fields are there, chat messages have a template."""
    team, count = job.config.team, job.config.training.num_agents
    if team.formatter:
        with _named(source):
            made = load_reward(team.formatter, None, job.source_root, "team.formatter").func
        formatters = resolve_formatters(made, count)[:1]
        chats = _try_formatters(job, source, rows, formatters)
        field = "team.formatter"
    else:
        formatters = text_formatters(count, team.templates, team.system_prompts)
        _check_fields(job, source, rows, formatters)
        chats = team.system_prompts is not None
        field = "team.system_prompts"
    if not chats:
        return
    for name in dict.fromkeys(names):
        if has_chat_template(_located(job, name), team.model_options) is False:
            raise ConfigError(
                f"{source}: {field}: chat messages need a chat template, and the tokenizer of {name!r} has none; "
                "put the text into team.templates, or use a chat model"
            )


def _check_fields(job: Job, source: str | Path, rows: Mapping[str, Rows], formatters: Sequence[Formatter]) -> None:
    team = job.config.team
    for field in ("templates", "system_prompts"):
        given = getattr(team, field)
        if given is None and field == "system_prompts":
            continue
        texts = [given] if isinstance(given, str) else given or ["{prompt}"]
        wanted = {name for text in texts for name in template_fields(text)}
        for tasks, of_set in rows.items():
            bad = next((i for i, row in enumerate(of_set) if not wanted <= row.keys()), None)
            if bad is not None:
                missing = ", ".join(repr(name) for name in sorted(wanted - of_set[bad].keys()))
                reads = "reads" if given is not None else "reads by default"
                raise DataError(
                    f"{source}: {tasks}: {_place(job, tasks, bad)}: the task has no field {missing}, which "
                    f"team.{field} {reads}; its fields: {', '.join(of_set[bad])}"
                )


def _try_formatters(job: Job, source: str | Path, rows: Mapping[str, Rows], formatters: Sequence[Formatter]) -> bool:
    """Call the user's formatter on the first rows; whether it made chat messages."""
    chats = False
    for tasks, of_set in rows.items():
        for index, row in enumerate(islice(of_set, FORMATTED_ROWS)):
            for formatter in formatters:
                where = f"{source}: team.formatter: {job.config.team.formatter}"
                try:
                    made = formatter(dict(row))
                except Exception as error:  # the user's code
                    raise ConfigError(
                        f"{where} raised {type(error).__name__}: {error} ({_place(job, tasks, index)})"
                    ) from error
                if not isinstance(made, str) and not is_messages(made):
                    raise ConfigError(
                        f"{where} must return a string or a list of messages with 'role' and 'content', not "
                        f"{type(made).__name__} ({_place(job, tasks, index)})"
                    )
                chats |= not isinstance(made, str)
    return chats


# ---- the pipeline's own files ----------------------------------------------------------------------------------------


def _check_pipeline(job: Job) -> None:
    """Before `comlrl.lock` and `dvc.yaml` are brought up to date: both, and `dvc.lock`, are what they should be."""
    from flows.jobs import user_files

    check_readable(job.work_root)
    pipeline.missing_dependencies(job.work_root / "dvc.yaml", user_files(job))
    lock = job.work_root / "dvc.lock"
    if lock.exists() and not pipeline.lock_backup(lock).exists():  # else a killed run is about to be put right
        parse(read(lock), lock)


@contextmanager
def _named(*names: str | Path) -> Iterator[None]:
    """Errors inside start with `names`; a name that the message starts with already is not repeated."""
    try:
        yield
    except ComlrlError as error:
        text = str(error)
        for name in reversed([str(name) for name in names]):
            if not text.startswith(f"{name}:") and not text.startswith(f"{name} "):
                text = f"{name}: {text}"
        raise type(error)(text) from error
