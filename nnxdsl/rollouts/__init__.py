"""Online training, from prompts to a batch to learn from: completions are sampled, rewarded and given advantages.

Importing the package registers the rewards that are computed by a model, and the engines.
"""

from nnxdsl.rollouts import reward_model, server

__all__ = ["reward_model", "server"]
