"""One critic: a model of its own, or a head on an actor's backbone; both are asked and trained in the same way."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.critics.encoding import History, HistoryEncoder
from comlrl_core.engine.processes import total
from comlrl_core.engine.protocol import Engine
from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.team.agent import Agent, context_length, default_prefix
from comlrl_core.team.encoding import Ids
from comlrl_core.team.generation import DEFAULT_TOKENS_PER_BATCH
from comlrl_core.team.scalar import (
    ScalarHead,
    ScalarModel,
    backbone_of,
    by_length,
    last_hidden,
    last_hidden_inside,
    padded,
)
from comlrl_core.team.scoring import unwrapped

Loss = Callable[[Tensor], Tensor]


class View(NamedTuple):
    """What there is to see of one agent at one node.

    Attributes:
        history: its prompts and responses of all turns so far, as texts; for `Q(h, a)` with a response to the last one.
        prompt_ids: the prompt of this turn as the actor reads it.
        response_ids: its response to that (`Q(h, a)`), or nothing (`V(h)`).
    """

    history: History
    prompt_ids: Ids
    response_ids: Ids = ()


class Critic(Protocol):
    """What the actor-critic loop asks of a critic."""

    engine: Engine  # of the critic's own parameters
    shares_backbone: bool  # whether learning a value moves an actor too

    @property
    def modules(self) -> list[nn.Module]:
        """Everything that a forward pass goes through, what the critic's engine trains first."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens at which an input is cut; None where nothing is cut here."""
        ...

    def encode(self, views: Sequence[Sequence[View]]) -> list[Ids]:
        """The critic's input for each entry, which holds the views of those agents that it sees."""
        ...

    def values(self, inputs: Sequence[Ids], tokens_per_batch: int | None = None) -> list[float]:
        """The value of each input, without a graph; it does not depend on what else is in the call."""
        ...

    def backward(self, inputs: Sequence[Ids], loss: Loss) -> float:
        """One forward of `inputs`, the gradient of `loss(values [B])` added to what is accumulated; returns the loss.

        Of several processes each brings its share, and the sum is returned. A loss that is not finite adds nothing.
        """
        ...


class CriticModel(ScalarModel):
    """A model that reads the histories of one agent or of all of them, with its own tokenizer.

    Args:
        backbone, tokenizer, source: as for `ScalarModel`.
        head: on the last hidden state.
        max_length: most tokens of an input; None = the backbone's context, which it may not exceed.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        head: ScalarHead,
        *,
        max_length: int | None = None,
        source: str = "",
    ) -> None:
        super().__init__(backbone, tokenizer, head, source)
        limit = context_length(backbone)
        if max_length is not None and limit is not None and max_length > limit:
            raise ConfigError(f"critic_max_length {max_length} is above the critic's context of {limit} tokens")
        self.encoder = HistoryEncoder(tokenizer, default_prefix(tokenizer), self.end_ids, max_length or limit)


class SeparateCritic:
    """A critic with a model of its own."""

    shares_backbone = False

    def __init__(self, model: CriticModel, engine: Engine) -> None:
        self.model, self.engine = model, engine

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    @property
    def max_length(self) -> int | None:
        return self.model.encoder.max_length

    def encode(self, views: Sequence[Sequence[View]]) -> list[Ids]:
        return self.model.encoder.encode([[view.history for view in entry] for entry in views])

    def values(self, inputs: Sequence[Ids], tokens_per_batch: int | None = None) -> list[float]:
        return self.model.score_ids(inputs, tokens_per_batch)

    def backward(self, inputs: Sequence[Ids], loss: Loss) -> float:
        result = loss(self.engine.model(*self.model.batch(inputs)))
        found = total(result.item())
        if math.isfinite(found):
            self.engine.backward(result)
        return found


class SharedCritic:
    """A value head on an actor's backbone. The head has an engine of its own; the backbone's is the actor's.

    It reads what the actor reads: the prompt of this turn (and, for `Q(h, a)`, the response).
    """

    shares_backbone = True

    def __init__(self, agent: Agent, head: ScalarHead, engine: Engine, actor_engine: Engine) -> None:
        self.agent, self.head = agent, head
        self.engine, self.actor_engine = engine, actor_engine
        self.backbone = backbone_of(agent.model)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.head, self.agent.model]

    @property
    def max_length(self) -> int | None:
        return None

    def encode(self, views: Sequence[Sequence[View]]) -> list[Ids]:
        return [view.prompt_ids + view.response_ids for (view,) in views]

    @torch.no_grad()
    def values(self, inputs: Sequence[Ids], tokens_per_batch: int | None = None) -> list[float]:
        found = [0.0] * len(inputs)
        with gathered(*self.modules):
            for rows in by_length(inputs, tokens_per_batch or DEFAULT_TOKENS_PER_BATCH):
                hidden = self._hidden([inputs[row] for row in rows], self.agent.model)
                for row, value in zip(rows, self._value(self.head, hidden).tolist(), strict=True):
                    found[row] = float(value)
        return found

    def backward(self, inputs: Sequence[Ids], loss: Loss) -> float:
        hidden = self._hidden(inputs, self.actor_engine.model)
        # Cut in two, so that each engine is handed a loss of its own parameters alone.
        seen = hidden.detach().requires_grad_()
        result = loss(self._value(self.engine.model, seen))
        found = total(result.item())
        if math.isfinite(found):
            self.engine.backward(result)
            assert seen.grad is not None
            self.actor_engine.backward((hidden * seen.grad).sum() / self.engine.loss_scale)
        return found

    def _hidden(self, inputs: Sequence[Ids], model: nn.Module) -> Tensor:
        """Last hidden states, through `model` where it is no plain one: an engine's wrapper, an adapter."""
        batch = padded(inputs, self.agent.pad_id, self.agent.device)
        if unwrapped(model) is model:
            return last_hidden(self.backbone, *batch)
        return last_hidden_inside(model, self.backbone, *batch)

    @staticmethod
    def _value(head: nn.Module, hidden: Tensor) -> Tensor:
        result: Tensor = head(hidden.to(next(head.parameters()).dtype))
        return result.squeeze(-1)
