"""The joint reward model: which of two joint responses is better, learned from pairs (Bradley-Terry)."""

from comlrl_core.preference.reward_model.diagnostics import (
    HeldOut,
    ProbeSample,
    exploitation_warning,
    probe_metrics,
    rank_correlation,
)
from comlrl_core.preference.reward_model.encoding import JointText
from comlrl_core.preference.reward_model.files import load_reward_model, open_reward_model, save_reward_model
from comlrl_core.preference.reward_model.fitting import FitSettings, RewardFit, fit
from comlrl_core.preference.reward_model.model import JointRewardModel
from comlrl_core.preference.reward_model.scorer import LearnedReward, learned_oracle

__all__ = [
    "FitSettings",
    "HeldOut",
    "JointRewardModel",
    "JointText",
    "LearnedReward",
    "ProbeSample",
    "RewardFit",
    "exploitation_warning",
    "fit",
    "learned_oracle",
    "load_reward_model",
    "open_reward_model",
    "probe_metrics",
    "rank_correlation",
    "save_reward_model",
]
