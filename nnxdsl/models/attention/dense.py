"""The dense kernel: one product over all slots of a row, under a mask."""

from __future__ import annotations

import jax

from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.kernel import ANY_AXIS, AttentionKernel, ScoreOptions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View


class Dense(AttentionKernel):
    """`dot_product_attention`, which computes everything that a model may ask for, on any devices."""

    name = "dense"
    title = "the dense product"
    length_axis = ANY_AXIS
    uses_mask = True

    def why(self, row: RowLayout) -> str:
        """Nothing: it is taken where no other kernel is."""
        return ""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        """See `AttentionKernel`."""
        assert view.mask is not None  # uses_mask
        return dot_product_attention(query, key, value, view.mask, *scores)
