"""The contract between a reward function and everything that trains or evaluates.

    reward_func(completions_1, ..., completions_N, batch_items=..., prompts=...) -> list of numbers

One list of texts per agent, one entry per joint response; the two keyword arguments are passed only where the
function names them (or takes any). The signature is read once, when the oracle is made. What the function
raises is never swallowed, and it is never called again with other arguments.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comlrl_core.errors import ConfigError, RewardError

RewardFunction = Callable[..., Any]
OnBadReward = Literal["fail", "drop"]
KEYWORDS = ("batch_items", "prompts")
TASKS_NAMED_IN_ERRORS = 5


@dataclass(frozen=True)
class Scored:
    """One joint response's reward: `raw` as the function gave it, `processed` after the reward processor.

    `dropped` means that either was NaN, infinite or missing; then `processed` is None (and `raw` too if it
    was the bad one).
    """

    raw: float | None
    processed: float | None
    dropped: bool = False


class Oracle:
    """A reward function whose answers are checked.

    `processor(reward) -> number` is applied to each raw reward. `on_bad_reward` says what a NaN, an infinite
    number or None does: `fail` raises, `drop` marks that joint response alone. `name` and `version` identify
    the oracle in records.

    Raises `ConfigError` if `func` cannot be called with `num_agents` lists and the keyword arguments that it
    names.
    """

    def __init__(
        self,
        func: RewardFunction,
        num_agents: int,
        processor: Callable[[float], Any] | None = None,
        on_bad_reward: OnBadReward = "fail",
        name: str | None = None,
        version: str | None = None,
    ) -> None:
        if on_bad_reward not in ("fail", "drop"):
            raise ConfigError(f"on_bad_reward: {on_bad_reward!r} is unknown; allowed: fail, drop")
        if processor is not None and not callable(processor):
            raise ConfigError(f"reward_processor: a {type(processor).__name__} cannot be called")
        if processor is not None:
            _check_processor(processor)
        self.func = func
        self.num_agents = num_agents
        self.processor = processor
        self.on_bad_reward = on_bad_reward
        self.name = name or function_name(func)
        self.version = version
        self.keywords = accepted_keywords(func, num_agents, self.name)

    @property
    def label(self) -> str:
        """What a record keeps about its oracle: `name@version`, or the name alone if there is no version."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The function's own `reward_range`, if it declares one."""
        return getattr(self.func, "reward_range", None)

    def score(
        self,
        completions: Sequence[Sequence[str]],
        batch_items: Sequence[Mapping[str, Any]],
        prompts: Sequence[str | Sequence[str]],
    ) -> list[Scored]:
        """Score B joint responses: `completions` is one list of B texts per agent, the rest has B entries.

        `batch_items[b]` is the task's row; `prompts[b]` is its prompt (a list with one per agent where they
        differ). Raises `RewardError` naming the function and the tasks: for an exception inside, a wrong
        number of rewards, something that is not a number, and, under `fail`, a reward that is NaN, infinite
        or None.
        """
        size = len(batch_items)
        if len(completions) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} lists of completions, got {len(completions)}")
        if any(len(texts) != size for texts in completions) or len(prompts) != size:
            raise ValueError("completions, batch_items and prompts must have the same number of entries")
        if size == 0:
            return []
        tasks = [_task_name(item, index) for index, item in enumerate(batch_items)]
        offered = {"batch_items": [dict(item) for item in batch_items], "prompts": list(prompts)}
        # Lists of its own: what the function does to its arguments stays there.
        lists = [list(texts) for texts in completions]
        try:
            result = self.func(*lists, **{key: offered[key] for key in self.keywords})
        except Exception as error:
            raise RewardError(
                f"reward function {self.name} raised {type(error).__name__}: {error} ({_listed(tasks)})"
            ) from error
        values = self._as_list(result, tasks)
        return [self._check(value, task) for value, task in zip(values, tasks, strict=True)]

    def _as_list(self, result: Any, tasks: list[str]) -> list[Any]:
        if hasattr(result, "tolist") and getattr(result, "ndim", 0) >= 1:
            result = result.tolist()
        if not isinstance(result, list | tuple):
            kind = type(result).__name__
            raise RewardError(
                f"reward function {self.name} returned a {kind}; it must return a list, one number per "
                f"joint response, here {len(tasks)} ({_listed(tasks)})"
            )
        if len(result) != len(tasks):
            raise RewardError(
                f"reward function {self.name} returned {len(result)} rewards for {len(tasks)} joint "
                f"responses ({_listed(tasks)})"
            )
        return list(result)

    def _check(self, value: Any, task: str) -> Scored:
        raw = self._number(value, f"reward function {self.name}", task)
        if raw is None:
            return Scored(None, None, dropped=True)
        if self.processor is None:
            return Scored(raw, raw)
        name = f"reward processor {function_name(self.processor)}"
        try:
            result = self.processor(raw)
        except Exception as error:
            raise RewardError(f"{name} raised {type(error).__name__} for {raw}: {error} (task {task})") from error
        processed = self._number(result, name, task)
        return Scored(raw, processed, dropped=processed is None)

    def _number(self, value: Any, giver: str, task: str) -> float | None:
        """`value` as a finite float; None if it is bad and bad rewards are dropped."""
        number = None if value is None else to_float(value)
        if value is not None and number is None:
            raise RewardError(f"{giver} returned {value!r} for task {task}; a reward must be a number")
        if number is not None and math.isfinite(number):
            return number
        if self.on_bad_reward == "drop":
            return None
        raise RewardError(
            f"{giver} returned {value!r} for task {task}; a reward must be finite "
            "(on_bad_reward: drop would leave this joint response out)"
        )


def accepted_keywords(func: RewardFunction, num_agents: int, name: str) -> tuple[str, ...]:
    """Which of `batch_items` and `prompts` `func` takes; `ConfigError` if it takes no `num_agents` lists."""
    if not callable(func):
        raise ConfigError(f"reward function {name}: a {type(func).__name__} cannot be called")
    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__):
        raise ConfigError(f"reward function {name} is asynchronous; it must return its rewards when called")
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return ()  # written in C without a signature: nothing is named
    parameters = signature.parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    keywords = tuple(key for key in KEYWORDS if takes_any or key in named)
    try:
        signature.bind(*([[]] * num_agents), **{key: [] for key in keywords})
    except TypeError as error:
        given = ", ".join([f"{num_agents} list(s) of completions", *(f"{key}=" for key in keywords)])
        raise ConfigError(
            f"reward function {name}{signature} cannot be called with {given}: {error}. It needs one "
            f"positional parameter per agent (or *completions); batch_items and prompts are passed by keyword"
        ) from error
    return keywords


def _check_processor(processor: Callable[[float], Any]) -> None:
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        return  # written in C without a signature
    try:
        signature.bind(0.0)
    except TypeError as error:
        raise ConfigError(
            f"reward_processor: {function_name(processor)}{signature} cannot be called with one reward: {error}"
        ) from error


def to_float(value: Any) -> float | None:
    """A Python, NumPy or PyTorch number (bool included) as a float; None if it is no number.

    A number too large for a float comes out as infinity. Strings are no numbers, whatever they say.
    """
    if not isinstance(value, int | float) and hasattr(value, "item"):
        if getattr(value, "ndim", 0) != 0:
            return None
        value = value.item()
    if isinstance(value, str | bytes | bytearray | complex) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def function_name(func: Any) -> str:
    """A name for messages and records: the function's own, or its class's if it has none."""
    inner = getattr(func, "func", func) if not hasattr(func, "__name__") else func
    return str(getattr(inner, "__name__", type(inner).__name__))


def _task_name(item: Mapping[str, Any], index: int) -> str:
    return str(item.get("task_id", f"number {index} of the batch"))


def _listed(tasks: list[str]) -> str:
    distinct = list(dict.fromkeys(tasks))
    more = f" and {len(distinct) - TASKS_NAMED_IN_ERRORS} more" if len(distinct) > TASKS_NAMED_IN_ERRORS else ""
    return f"tasks {', '.join(distinct[:TASKS_NAMED_IN_ERRORS])}{more}"
