"""What happens between turns: a user's function gives every agent its next prompt.

external_transition(prompt=..., agent_completions=..., num_agents=...,
                    prompt_history_per_agent=..., response_history_per_agent=...) -> one text per agent
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comlrl_core.errors import ConfigError, TransitionError
from comlrl_core.rewards.contract import function_name
from comlrl_core.team.formatters import render
from comlrl_core.team.team import Team

KEYWORDS = ("prompt", "agent_completions", "num_agents", "prompt_history_per_agent", "response_history_per_agent")


class Transition:
    """An `external_transition` whose answers are checked.

    Each text that it returns becomes the field `prompt` of the task's row, which then goes through that agent's
    formatter; with `passthrough` the text itself is the agent's next prompt.

    Raises `ConfigError` if `func` cannot be called with the published keywords.
    """

    def __init__(self, func: Callable[..., Any], passthrough: bool = False) -> None:
        self.func = func
        self.passthrough = passthrough
        self.name = function_name(func)
        if not callable(func):
            raise ConfigError(f"external_transition: a {type(func).__name__} cannot be called")
        try:
            signature = inspect.signature(func)
        except (TypeError, ValueError):
            return  # written in C without a signature: nothing is named
        try:
            signature.bind(**dict.fromkeys(KEYWORDS))
        except TypeError as error:
            raise ConfigError(
                f"external_transition {self.name}{signature} cannot be called with the keywords "
                f"{', '.join(KEYWORDS)}: {error}"
            ) from error

    def next_prompts(
        self,
        team: Team,
        row: Mapping[str, Any],
        prompt_history: Sequence[Sequence[str]],
        response_history: Sequence[Sequence[str]],
    ) -> tuple[str, ...]:
        """The rendered prompts of the turn after a branch, one per agent.

        Args:
            row: the task.
            prompt_history: per agent the prompts that it has seen along this branch, oldest first.
            response_history: per agent its responses along this branch, the latest one included.

        Raises:
            TransitionError: the function raised, or did not return one text per agent; names it and the task.
        """
        where = f"external_transition {self.name} (task {row.get('task_id', '?')}, turn {len(response_history[0])})"
        try:
            result = self.func(
                prompt=str(row["prompt"]) if "prompt" in row else prompt_history[0][0],
                agent_completions=[responses[-1] for responses in response_history],
                num_agents=team.num_agents,
                # Lists of its own: what the function does to its arguments stays there.
                prompt_history_per_agent=[list(prompts) for prompts in prompt_history],
                response_history_per_agent=[list(responses) for responses in response_history],
            )
        except Exception as error:
            raise TransitionError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, list | tuple):
            raise TransitionError(
                f"{where} returned a {type(result).__name__}; it must return a list or tuple of {team.num_agents} texts"
            )
        if len(result) != team.num_agents:
            raise TransitionError(f"{where} returned {len(result)} prompts for {team.num_agents} agents")
        for agent, text in enumerate(result):
            if not isinstance(text, str):
                raise TransitionError(f"{where} returned a {type(text).__name__} for agent {agent}, not a text")
        if self.passthrough:
            return tuple(result)
        return tuple(
            render(agent.tokenizer, formatter({**row, "prompt": text}))
            for agent, formatter, text in zip(team.agents, team.formatters, result, strict=True)
        )
