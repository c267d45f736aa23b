"""Configuration of the lightning indexer of DeepSeek sparse attention (DSA); no jax, and no family by name."""

from __future__ import annotations

import attrs

from nnxdsl.models.config.checks import require_above_zero
from nnxdsl.models.config.tensors import TensorSource, norms

_WEIGHTS = {"query": "wq_b", "key": "wk", "weights": "weights_proj"}


@attrs.frozen(kw_only=True)
class IndexerConfig:
    """The lightning indexer: it scores all earlier tokens, and attention is to the best of them (arXiv:2512.02556).

    Attributes:
        num_heads: heads of its queries; all share one key.
        head_dim: width of a head; its first `qk_rope_head_dim` dimensions are rotated.
        topk: tokens that a token attends to, at most.
        rope_interleave: whether RoPE rotates pairs of neighbours; else the two halves. Latent attention has its own.
        selects: whether attention is to the selected tokens alone. False in the dense warm-up, in which the indexer
            learns from attention to all tokens.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool = False
    selects: bool = True

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "indexer.", "num_heads", "head_dim", "topk")

    def tensors(self) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer's indexer in a checkpoint of the Hub."""
        ours, theirs = "attention.indexer", "self_attn.indexer"
        return {
            **{f"{ours}.{array}": TensorSource((f"{theirs}.{name}.weight",), transposed=True)
               for array, name in _WEIGHTS.items()},
            **norms({f"{ours}.key_norm": f"{theirs}.k_norm"}),
            f"{ours}.key_norm.bias": TensorSource((f"{theirs}.k_norm.bias",)),
        }  # fmt: skip
