"""Importance sampling: what corrects a policy gradient for a sampler that is not the policy to the last digit."""

from __future__ import annotations

from typing import Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, inner

Level = Literal["token", "sequence", "sequence_mean"]


@attrs.frozen(kw_only=True)
class ImportanceSampling(Spec):
    """A weight of each token's loss: its probability under the trainer over that under the sampler.

    Sampler and trainer compute the same policy by other means: other kernels, another dtype, another engine, weights of
    an earlier step. Without the weight, the gradient is that of what the sampler samples. Of a token, the log-ratio is
    `d = o - s`: `o` its log-probability under the policy before the update, as the trainer computes it, `s` that of the
    sampler. Both are of all tokens, also where `top_k` or `top_p` leave some out: their ratio is 1 on policy, where
    TRL 1.16's is the probability mass that is left. No gradient flows through the weight.

    Attributes:
        level: "token": `exp(d)` of each token. "sequence": `exp(sum d)` of each completion (TRL's "sequence_truncate"
            and "sequence_mask"). "sequence_mean": `exp(mean d)`, which does not grow with the length.
        mode: What becomes of weights outside the bounds: "truncate" moves them to the bound (truncated importance
            sampling, https://fengyao.notion.site/off-policy-rl), "mask" sets them to 0 (IcePop, arXiv:2510.18855).
        max_ratio: The upper bound.
        min_ratio: The lower bound; None for none.
    """

    level: Level = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    max_ratio: float = attrs.field(default=2.0, validator=Limit(above=1))
    min_ratio: float | None = attrs.field(default=None, validator=inner)
