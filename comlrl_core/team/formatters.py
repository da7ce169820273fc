"""From a task's row to the text of an agent's prompt.

A formatter is a function `f(row) -> str | messages`. A string is the prompt as it stands; a list of chat
messages is rendered with the tokenizer's chat template, generation prompt included. Plain-text templates and
system prompts make formatters without any Python.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from comlrl_core.errors import ConfigError, DataError

if TYPE_CHECKING:  # settings are checked before Transformers is imported
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Formatter = Callable[[Mapping[str, Any]], str | Messages]
FormatterSpec = str | Formatter | None

_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def default_formatter(row: Mapping[str, Any]) -> str:
    """The row's field `prompt` as it is."""
    return _field(row, "prompt", "the default formatter")


def text_formatter(template: str = "{prompt}", system_prompt: str | None = None) -> Formatter:
    """A formatter from plain text: every `{name}` becomes the row's field of that name.

    `{{` and `}}` stand for single braces, other braces for themselves. With a system prompt (it may name
    fields too) the result is a chat: the system message, then the filled template as the user's.
    """

    def formatter(row: Mapping[str, Any]) -> str | Messages:
        text = _fill(template, row)
        if system_prompt is None:
            return text
        return [{"role": "system", "content": _fill(system_prompt, row)}, {"role": "user", "content": text}]

    return formatter


def text_formatters(
    num_agents: int,
    templates: str | Sequence[str | None] | None = None,
    system_prompts: str | Sequence[str | None] | None = None,
) -> list[Formatter]:
    """One formatter per agent from templates and system prompts, each given once for all agents or one per
    agent."""
    per_agent = zip(
        _per_agent(templates, num_agents, "templates"),
        _per_agent(system_prompts, num_agents, "system prompts"),
        strict=True,
    )
    return [text_formatter("{prompt}" if template is None else template, system) for template, system in per_agent]


def template_fields(template: str) -> list[str]:
    """The fields that a template names, in order, each once."""
    return list(dict.fromkeys(match[1] for match in _FIELD.finditer(template) if match[1] is not None))


def resolve_formatters(spec: FormatterSpec | Sequence[FormatterSpec], num_agents: int) -> list[Formatter]:
    """One formatter per agent from: nothing (the field `prompt`), one function or template for all, or a list
    of them.

    Raises `ConfigError` when a list has another length than the team, or holds something else than functions
    and texts.
    """
    return [_formatter(one, agent) for agent, one in enumerate(_per_agent(spec, num_agents, "formatters"))]


def render(tokenizer: "PreTrainedTokenizerBase", value: str | Messages) -> str:
    """The prompt's text: a string as it is, messages through the tokenizer's chat template.

    Raises `ConfigError` for anything else, for a tokenizer without a template, and for messages that its
    template refuses.
    """
    if isinstance(value, str):
        return value
    if not is_messages(value):
        raise ConfigError(
            f"a formatter must return a string or a list of messages with 'role' and 'content', not {_short(value)}"
        )
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "chat messages (a system prompt makes some) need a chat template, "
            f"and the tokenizer {name!r} has none: "
            "put the text into the template of the prompt, or use a chat model"
        )
    messages: list[dict[str, Any]] = [dict(message) for message in value if isinstance(message, Mapping)]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise ConfigError(f"the chat template of the tokenizer {name!r} refuses the messages: {error}") from error


def _formatter(spec: FormatterSpec, agent: int) -> Formatter:
    if spec is None:
        return default_formatter
    if isinstance(spec, str):
        return text_formatter(spec)
    if callable(spec):
        return spec
    raise ConfigError(f"the formatter of agent {agent} must be a function or a text, not {_short(spec)}")


def _per_agent(value: Any, num_agents: int, what: str) -> list[Any]:
    if value is None or isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_agents
    if len(value) != num_agents:
        raise ConfigError(f"{len(value)} {what} for {num_agents} agents: give one for all, or one per agent")
    return list(value)


def _fill(template: str, row: Mapping[str, Any]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return _field(row, match[1], f"the template {_short(template)}")

    return _FIELD.sub(replacement, template)


def _field(row: Mapping[str, Any], name: str, reader: str) -> str:
    if name not in row:
        task = f" of task {row['task_id']!r}" if "task_id" in row else ""
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(f"{reader} reads the field {name!r}, which the row{task} lacks; its fields: {fields}")
    return str(row[name])


def is_messages(value: Any) -> bool:
    """Whether `value` is a list of chat messages, at least one."""
    return isinstance(value, Sequence) and bool(value) and all(_is_message(message) for message in value)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and "content" in message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
