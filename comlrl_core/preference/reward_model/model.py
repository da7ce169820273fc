"""`JointRewardModel`: one number for a joint response, read at the last token of every agent's text together."""

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.engine.weights import gathered
from comlrl_core.errors import ConfigError
from comlrl_core.preference.reward_model.encoding import Ids, JointEncoder, JointText
from comlrl_core.rl.masks import length_mask, position_ids
from comlrl_core.team.agent import context_length, default_prefix, eos_ids
from comlrl_core.team.scoring import scoring_mode

HEAD_STD = 0.02  # where a configuration names no `initializer_range`
DEFAULT_TOKENS_PER_BATCH = 32_768


class JointRewardModel(nn.Module):
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
        super().__init__()
        if num_agents < 1:
            raise ConfigError(f"a reward model reads the texts of at least one agent, not {num_agents}")
        self.backbone = backbone
        self.source = source
        config = backbone.config.get_text_config()
        device = next(backbone.parameters()).device
        self.head = nn.Linear(int(config.hidden_size), 1, bias=False)
        std = getattr(config, "initializer_range", None) or HEAD_STD
        with torch.no_grad():
            self.head.weight.normal_(0.0, std, generator=torch.Generator().manual_seed(seed % 2**63))
        self.register_buffer("shift", torch.zeros((), dtype=torch.float32))
        self.head.to(device)
        self.shift = self.shift.to(device)
        limit = context_length(backbone)
        if max_length is not None and limit is not None and max_length > limit:
            raise ConfigError(f"reward_max_length {max_length} is above the reward model's context of {limit} tokens")
        self.encoder = JointEncoder(
            tokenizer,
            num_agents,
            prefix_ids=default_prefix(tokenizer),
            end_ids=_end_ids(backbone, tokenizer),
            max_length=max_length or limit,
        )
        if self.encoder.max_length is not None:
            marks = len(self.encoder.prefix_ids) + num_agents * (len(self.encoder.end_ids) + 1)
            if self.encoder.max_length < marks:
                raise ConfigError(
                    f"reward_max_length {self.encoder.max_length} is too short for {num_agents} agents: with one token "
                    f"per response a joint text has {marks}"
                )
        self.eval()

    @property
    def num_agents(self) -> int:
        return self.encoder.num_agents

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def pad_id(self) -> int:
        """Fills a batch; masks come from lengths, so it may be any valid id."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else next(iter(self.encoder.end_ids), 0)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

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
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
        accepted = inspect.signature(self.backbone.forward).parameters
        if "use_cache" in accepted:
            inputs["use_cache"] = False
        if "position_ids" in accepted:
            inputs["position_ids"] = position_ids(attention_mask)
        hidden = self.backbone(**inputs).last_hidden_state
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask.long() * places).argmax(dim=1)
        final = hidden[torch.arange(len(hidden), device=hidden.device), last]
        scores = self.head(final.to(self.head.weight.dtype)).squeeze(-1)
        return (scores if scores.dtype == torch.float64 else scores.float()) - self.shift

    def batch(self, sequences: Sequence[Ids], padding_side: str = "right") -> tuple[Tensor, Tensor]:
        """`input_ids` and `attention_mask` `[B, L]` of some sequences, on the model's device."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        width = int(lengths.max())
        mask = length_mask(lengths, width)
        rows = [[self.pad_id] * (width - len(ids)) for ids in sequences]
        if padding_side == "left":
            mask = mask.flip(1)
            input_ids = torch.tensor([pad + list(ids) for ids, pad in zip(sequences, rows, strict=True)])
        else:
            input_ids = torch.tensor([list(ids) + pad for ids, pad in zip(sequences, rows, strict=True)])
        return input_ids.to(self.device), mask.to(self.device)

    @torch.no_grad()
    def score_ids(self, sequences: Sequence[Ids], tokens_per_batch: int | None = None) -> list[float]:
        """A score per sequence; neighbours in length share a batch of at most `tokens_per_batch` tokens."""
        scores = [0.0] * len(sequences)
        with gathered(self), scoring_mode(self):
            for rows in _by_length(sequences, tokens_per_batch or DEFAULT_TOKENS_PER_BATCH):
                found = self(*self.batch([sequences[row] for row in rows])).tolist()
                for row, score in zip(rows, found, strict=True):
                    scores[row] = float(score)
        return scores

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


def _end_ids(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """One end-of-sequence token, or a line break where the tokenizer has none."""
    declared = eos_ids(backbone, tokenizer)
    if declared:
        return declared[:1]
    return tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])


def _by_length(sequences: Sequence[Ids], tokens_per_batch: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        # The first of a batch is its longest, and sets its width.
        if not batches or (len(batches[-1]) + 1) * len(sequences[batches[-1][0]]) > tokens_per_batch:
            batches.append([])
        batches[-1].append(row)
    return batches
