"""QK-clip: query and key projections of heads with too large attention scores are scaled down after an update.

Kimi K2 (arXiv:2507.20534, section 2.1, algorithm 1). With `s` the largest score of a head over the batch of a step and
`gamma = min(1, max_logit / s)`, the head's next scores are multiplied by gamma: weights of its own queries and of its
own keys by the root of gamma each, those of its queries that meet a key which other heads share by gamma alone. Weights
that several heads share stay as they are, so that no other head changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.optimizer import Muon, Optimizer
from nnxdsl.errors import Problem
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.config.mixer import HeadColumns

FIELD = "optimizer.max_attention_logit"

MAX_LOGIT, CLIPPED = "max_attention_logit", "qk_clipped_heads"
"""Metrics: the largest score of all heads in a step, and how many heads were scaled down after it."""


@attrs.frozen
class QKClip:
    """QK-clip of one decoder.

    Attributes:
        max_logit: The score above which a head is scaled down (tau).
        layers: For the path of each block with attention, the columns of its linear layers that are scaled.
    """

    max_logit: float
    layers: Mapping[str, tuple[HeadColumns, ...]]

    def __call__(self, trainable: Mapping[str, jax.Array], max_logits: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters after an update, scaled down where a head's score was above `max_logit` before it.

        Args:
            trainable: Float32 parameters by path.
            max_logits: For the path of each block the largest score of each head, `[layers, heads]` float32, or
                `[heads]` outside of a stack.
        """
        scaled = dict(trainable)
        for block, parts in self.layers.items():
            gamma = self._gamma(max_logits[block])[..., None]  # [..., heads, 1]
            for part in parts:
                exponents = np.concatenate([np.full(count, power, np.float32) for count, power in part.runs])
                factors = gamma**exponents  # exactly one where gamma or the exponent says so
                factors = factors.reshape(*gamma.shape[:-2], -1)  # [..., heads * width]
                kernel, bias = f"{block}.{part.linear}.kernel", f"{block}.{part.linear}.bias"
                scaled[kernel] = scaled[kernel] * factors[..., None, :]
                if bias in scaled:
                    scaled[bias] = scaled[bias] * factors
        return scaled

    def metrics(self, max_logits: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The largest score of all heads (float32), and the number of heads above `max_logit` (int32)."""
        logits = [max_logits[block] for block in self.layers]
        largest = jnp.max(jnp.stack([jnp.max(heads) for heads in logits]))
        clipped = sum(jnp.sum(heads > self.max_logit, dtype=jnp.int32) for heads in logits)
        return {MAX_LOGIT: largest, CLIPPED: jnp.asarray(clipped)}

    def _gamma(self, max_logits: jax.Array) -> jax.Array:
        is_above = max_logits > self.max_logit  # no NaN is, nor an infinity below zero
        return jnp.where(is_above, self.max_logit / jnp.where(is_above, max_logits, 1.0), 1.0)


def build(optimizer: Optimizer, config: DecoderConfig) -> QKClip | None:
    """Build QK-clip from the optimizer's setting; None where it is unset."""
    if not isinstance(optimizer, Muon) or optimizer.max_attention_logit is None:
        return None
    kinds: dict[str, LayerKind] = {config.layers.path(layer)[0]: kind for layer, kind in enumerate(config.layers.kinds)}
    mixers = {block: (config.layer(kind).mixer, config.of(kind)) for block, kind in kinds.items()}
    parts = {block: mixer.qk_columns(layer) for block, (mixer, layer) in mixers.items() if mixer is not None}
    return QKClip(optimizer.max_attention_logit, {block: columns for block, columns in parts.items() if columns})


def problems(optimizer: Optimizer, config: DecoderConfig, trainable: Mapping[str, object]) -> list[Problem]:
    """Problems that rule out QK-clip; empty without the setting."""
    clip = build(optimizer, config)
    if clip is None:
        return []
    message = _refusal(config)
    if message is None and not clip.layers:
        message = "has no effect: the model has no attention layers"
    if message is not None:
        return [Problem(FIELD, f"{message}; unset it")]
    paths = (f"{block}.{part.linear}.kernel" for block, parts in clip.layers.items() for part in parts)
    if fixed := next((path for path in paths if path not in trainable), None):
        return [Problem(FIELD, f"rescales query and key projections, and '{fixed}' is frozen; train it too")]
    return []


def _refusal(config: DecoderConfig) -> str | None:
    layers = [config.of(kind) for kind in set(config.layers.kinds) if config.layer(kind).is_attention]
    if config.mla is None and any(layer.attention.query_key_norm != "none" for layer in layers):
        return "queries and keys are normalized (QK-norm), which undoes any scaling of their projections"
    if config.layers.num_kv_shared_layers:
        return "layers share keys with other layers (KV sharing)"
    if any(layer.attention.values == "keys" for layer in layers):
        return "values share the projection of keys, which must not be rescaled"
    return None
