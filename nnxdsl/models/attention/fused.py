"""The fused kernels of cuDNN and Pallas: one platform each, and rows and layers that none of them computes."""

from __future__ import annotations

from nnxdsl.models.attention.kernel import AttentionKernel, CompileTarget, ScoreOptions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig


class FusedKernel(AttentionKernel):
    """A kernel of one platform; its residuals are much the same as those of "chunked"."""

    traced_as = "chunked"

    def supports(self, row: RowLayout, config: DecoderConfig, target: CompileTarget) -> str | None:
        """See `AttentionKernel`."""
        title, indexer = self.title, None if config.mla is None else config.mla.indexer
        if indexer is not None and indexer.selects and row.size > indexer.topk:
            return f"{title} is to all tokens, not to {indexer.topk:,} that an indexer selects"
        if row.packed:
            return f"{title} cannot tell the sequences of a packed row apart"
        if target.stages > 1:
            return f"{title} is not computed in a pipeline's stages"
        if config.attention.sinks:
            return f"{title} has no sinks"
        if config.window_kind == "chunks" and any(layer.window for layer in config.specs.values()):
            return f"{title} has no chunks"
        if not target.splits_heads_alike:
            return f"{title} needs query heads and key/value heads split alike"
        return None

    def require_plain(self, view: View, scores: ScoreOptions) -> None:
        """Refuses a layer that `supports` rules out.

        Raises:
            ValueError: it has chunks, an indexer or sinks.
        """
        if view.method.is_chunked:
            raise ValueError(f"{self.name} attention has no chunks")
        if view.selected is not None:
            raise ValueError(f"{self.name} attention is to all tokens, not to those that an indexer selects")
        if scores.sinks is not None:
            raise ValueError(f"{self.name} attention has no sinks")
