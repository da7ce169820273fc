"""Measuring a team on held-out tasks without touching its training."""

from comlrl_core.evaluation.evaluate import EvaluatedSample, evaluate
from comlrl_core.evaluation.statistics import WinRate, summarize, win_rate

__all__ = ["EvaluatedSample", "WinRate", "evaluate", "summarize", "win_rate"]
