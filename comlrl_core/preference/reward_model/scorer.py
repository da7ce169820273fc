"""A fitted reward model in the place of a reward function."""

from collections.abc import Sequence
from typing import Literal

from comlrl_core.errors import DataError
from comlrl_core.preference.reward_model.encoding import JointText
from comlrl_core.preference.reward_model.model import JointRewardModel
from comlrl_core.rewards.contract import Oracle

NAME = "reward_model"
VERSION_DIGITS = 16


class LearnedReward:
    """A reward function by its contract: one list of texts per agent in, one number per joint response out.

    A joint response that does not fit the model's length gives None: `on_bad_reward` decides what becomes of it.
    """

    def __init__(self, model: JointRewardModel, tokens_per_batch: int | None = None) -> None:
        self.model = model
        self.tokens_per_batch = tokens_per_batch

    def __call__(self, *completions: Sequence[str], prompts: Sequence[str | Sequence[str]] = ()) -> list[float | None]:
        agents = self.model.num_agents
        if len(completions) != agents:
            raise DataError(f"{len(completions)} lists of completions for a reward model of {agents} agents")
        texts = [
            JointText((prompt,) * agents if isinstance(prompt, str) else tuple(prompt), joint)
            for prompt, joint in zip(prompts, zip(*completions, strict=True), strict=True)
        ]
        return self.model.score(texts, self.tokens_per_batch)


def learned_oracle(
    model: JointRewardModel, on_bad_reward: Literal["fail", "drop"] = "fail", tokens_per_batch: int | None = None
) -> Oracle:
    """An oracle that asks `model`: no reward processor, and the digest of the weights as its version."""
    return Oracle(
        LearnedReward(model, tokens_per_batch),
        model.num_agents,
        on_bad_reward=on_bad_reward,
        name=NAME,
        version=model.fingerprint()[:VERSION_DIGITS],
    )
