"""The protocol of attention kernels: what they compute, where they can, and how they divide a row over devices."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import attrs
import jax
import numpy as np

from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig

ANY_AXIS = "any"
"""As `AttentionKernel.length_axis`: XLA partitions the kernel, over whatever axis the tokens of a row are divided."""


@attrs.frozen(kw_only=True)
class CompileTarget:
    """The devices that attention is compiled for, and how heads, layers and the tokens of a row are divided over them.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: name of the dtype of activations and products.
        capability: compute capability of the GPUs; None where it is not known, which counts as 9.0 or above.
        length_axis: the mesh axis over which the tokens of a row are divided, several joined by "+"; None for none.
        length_shards: over how many devices.
        stages: pipeline stages.
        splits_heads_alike: whether query heads and key/value heads are divided over the same devices.
    """

    platform: str = "cpu"
    dtype: str = "float32"
    capability: float | None = None
    length_axis: str | None = None
    length_shards: int = 1
    stages: int = 1
    splits_heads_alike: bool = True


class ScoreOptions(NamedTuple):
    """What a layer does to scores.

    Attributes:
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`; None for no cap.
        sinks: `[N]`, see `apply_sinks`; None for none.
    """

    scale: float
    soft_cap: float | None = None
    sinks: jax.Array | None = None


@runtime_checkable
class AttentionKernel(Protocol):
    """Attention of the tokens of a call to each other; a kernel is a subclass, in a file of its own.

    `memory.attention` selects one by name: those of `kernels.py`, or `module:Class` of any other package.

    Attributes:
        name: as in `memory.attention`.
        title: as in messages.
        platform: the only platform that it runs on; None for all.
        length_axis: the mesh axis over which it divides the tokens of a row itself, as ring attention does within
            `shard_map_call`; `ANY_AXIS` where XLA does it; None where every device needs whole rows.
        uses_mask: whether it reads `View.mask`, the mask of whole rows; others compute masks from positions.
        traced_as: the kernel whose residuals the memory of a backward pass is estimated from, where this one cannot be
            traced on every platform; empty for itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    platform: ClassVar[str | None] = None
    length_axis: ClassVar[str | None] = None
    uses_mask: ClassVar[bool] = False
    traced_as: ClassVar[str] = ""

    def supports(self, row: RowLayout, config: DecoderConfig, target: CompileTarget) -> str | None:
        """Why it cannot compute attention of such rows; None if it can.

        Args:
            row: the layout of the rows.
            config: the decoder.
            target: the devices. Their platform and `length_axis` are checked already.
        """
        return None

    def token_order(self, length: int, shards: int) -> np.ndarray | None:
        """The slots of a row in the order in which devices hold them, `[length]`; None for that of the row.

        It gives all devices as much work, as zig-zag does in a ring: the result must be right in any order.

        Args:
            length: slots of a row.
            shards: over how many devices they are divided.
        """
        return None

    def not_worth(self, row: RowLayout) -> str | None:
        """Why "auto" prefers a later kernel for such rows, which this one could compute; None if it does not."""
        return None

    def why(self, row: RowLayout) -> str:
        """Why "auto" takes it, beside the reasons against the kernels before it."""
        return f"{self.title} serves this program"

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        """Grouped-query self-attention, equal to `dot_product_attention` for every real token.

        Args:
            query: `[B, T, N, H]`.
            key: `[B, T, K, H]`, K a divisor of N.
            value: `[B, T, K, V]`, V often H.
            view: positions and mask of this call, and in `view.method` the row's layout and the layer's window.
            scores: their factor, soft cap and sinks.

        Returns:
            `[B, T, N, V]` in the dtype of `query`; anything finite for padding.
        """
        ...
