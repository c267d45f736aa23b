"""Rewards of sampled completions: functions looked up, checked against the columns that they read, and called."""

from nnxdsl.data.rewards import library, registered
from nnxdsl.data.rewards.calls import Sampled
from nnxdsl.data.rewards.functions import function_of
from nnxdsl.data.rewards.scoring import Rewards, Scores

__all__ = ["Rewards", "Sampled", "Scores", "function_of", "library", "registered"]
