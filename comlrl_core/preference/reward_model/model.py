"""`JointRewardModel`: one number for a joint response, read at the last token of every agent's text together."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.preference.reward_model.encoding import JointEncoder, JointText
from comlrl_core.team.agent import context_length, default_prefix
from comlrl_core.team.scalar import ScalarModel, hidden_size, initial_std


class JointRewardModel(ScalarModel):
    """A causal language model without its head, and a scalar head in fp32 on the last hidden state.

    Args:
        backbone: the model without its language-model head (`model.base_model` of a causal one).
        tokenizer: the backbone's; it need not be the agents'.
        num_agents: how many texts make a joint response.
        max_length: most tokens of a joint text; None = the backbone's context, which it may not exceed.
        seed: of the head's weights.
        source: what the backbone was loaded from, for records.

    `shift` is subtracted from every score: fitting sets it to the mean score of its pairs. Preferences do not
    determine the level of the scores, and an advantage without a baseline should not depend on it.
    """

    head: nn.Linear
    shift: Tensor

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        num_agents: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        source: str = "",
    ) -> None:
        if num_agents < 1:
            raise ConfigError(f"a reward model reads the texts of at least one agent, not {num_agents}")
        head = nn.Linear(hidden_size(backbone), 1, bias=False)
        with torch.no_grad():
            head.weight.normal_(0.0, initial_std(backbone), generator=torch.Generator().manual_seed(seed % 2**63))
        super().__init__(backbone, tokenizer, head, source)
        self.register_buffer("shift", torch.zeros((), dtype=torch.float32, device=self.device))
        limit = context_length(backbone)
        if max_length is not None and limit is not None and max_length > limit:
            raise ConfigError(f"reward_max_length {max_length} is above the reward model's context of {limit} tokens")
        self.encoder = JointEncoder(
            tokenizer,
            num_agents,
            prefix_ids=default_prefix(tokenizer),
            end_ids=self.end_ids,
            max_length=max_length or limit,
        )
        if self.encoder.max_length is not None:
            marks = len(self.encoder.prefix_ids) + num_agents * (len(self.encoder.end_ids) + 1)
            if self.encoder.max_length < marks:
                raise ConfigError(
                    f"reward_max_length {self.encoder.max_length} is too short for {num_agents} agents: with one token "
                    f"per response a joint text has {marks}"
                )

    @property
    def num_agents(self) -> int:
        return self.encoder.num_agents

    def freeze_backbone(self) -> "JointRewardModel":
        """Train the head alone."""
        self.backbone.requires_grad_(False)
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores of a padded batch.

        Args:
            input_ids: Long `[B, L]`.
            attention_mask: True means a real token, Bool `[B, L]`; pads on either side.

        Returns:
            `[B]`, fp32 (or fp64), the shift subtracted.
        """
        return super().forward(input_ids, attention_mask) - self.shift

    def score(self, texts: Sequence[JointText], tokens_per_batch: int | None = None) -> list[float | None]:
        """A score per joint text, whatever else is in the call; None where the responses do not fit."""
        encoded = self.encoder.encode(texts)
        fitting = [ids for ids in encoded if ids is not None]
        found = iter(self.score_ids(fitting, tokens_per_batch))
        return [None if ids is None else next(found) for ids in encoded]

    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all weights, and what the scores depend on beside them."""
        digest = hashlib.sha256(f"{self.num_agents}|{self.encoder.max_length}|".encode())
        with gathered(self):
            for name, tensor in sorted(self.state_dict().items()):
                digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()
