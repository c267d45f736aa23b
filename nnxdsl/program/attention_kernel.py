"""The choice of the attention kernel, with its reason: by setting, platform, network and row layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
from jax.typing import DTypeLike

from nnxdsl.config.memory import Attention
from nnxdsl.errors import PlanError, Problem
from nnxdsl.models.attention.row_layout import QUERIES, AttentionMethod, Kernel, RowLayout
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.sharding.layout import Layout
from nnxdsl.sharding.rules import pieces

SHORT = 256
"""Slots of a row below which one dense product is as quick as blocks of queries; measured on a CPU."""

_WIDEST = 256
_OLDER_WIDEST = 128  # before compute capability 9.0


class Choice(NamedTuple):
    """A kernel, and why it is this one."""

    kernel: Kernel
    why: str


@attrs.frozen
class Kernels:
    """What a choice goes by, beside the rows.

    Attributes:
        kernel: `Memory.attention`.
        platform: "cpu", "gpu" or "tpu".
        dtype: Name of the dtype that is computed in.
        head_dim: Width of a head.
        soft_cap: Whether scores have a soft cap.
        length_shards: Over how many devices the tokens of a row are split.
        stages: In how many stages the stack of layers works.
        has_local_heads: Whether query heads and key/value heads are split over other devices.
        packed: Whether rows are packed.
        sinks: Whether a head's softmax has a score of its own.
        has_chunks: Whether local layers attend within chunks.
        topk: The most tokens that a token attends to, where an indexer selects them; None where it does not.
        capability: Of the GPUs; None where it is not known, which is taken for 9.0 or above.
    """

    kernel: Attention = "auto"
    platform: str = "cpu"
    dtype: str = "float32"
    head_dim: int = 64
    soft_cap: bool = False
    length_shards: int = 1
    stages: int = 1
    has_local_heads: bool = False
    packed: bool = False
    sinks: bool = False
    has_chunks: bool = False
    topk: int | None = None
    capability: float | None = None

    def choose(self, row: RowLayout | None) -> Choice:
        """The kernel for rows of this layout; None for slots of which nothing is known, as in a cache.

        A kernel that was requested by name is used wherever it can compute the row: `problems` has the reasons if not
        this program.
        """
        if row is None:
            return Choice("dense", "of a cache's slots nothing is known before")
        if self.kernel != "auto":
            return Choice(self.kernel, "asked for by name")
        if self.length_shards > 1:
            return Choice("dense", self._refusal("chunked", row.packed) or "")
        fused: Kernel | None = {"gpu": "cudnn", "tpu": "splash"}.get(self.platform)  # pyright: ignore[reportAssignmentType]
        if fused and self.topk is not None and row.size > self.topk:
            refused = f"{_TITLES[fused]} is to all tokens, not to {self.topk:,} that an indexer selects"
        else:
            refused = self._refusal(fused, row.packed) if fused else None
        if fused and not refused:
            return Choice(fused, f"{_TITLES[fused]} serves this program")
        because = f"; {refused}" if refused else ""
        if row.size < SHORT:
            return Choice("dense", f"rows of {row.size} slots are short{because}")
        return Choice("chunked", f"of rows of {row.size} slots, blocks leave out what no token sees{because}")

    def method(self, row: RowLayout) -> AttentionMethod:
        """How attention over such rows is computed."""
        # Each block is code of its own, which compilers for GPUs and TPUs take seconds for.
        return AttentionMethod(self.choose(row).kernel, row, queries=QUERIES if self.platform == "cpu" else 4 * QUERIES)

    def problems(self) -> list[Problem]:
        """Why the kernel that was requested by name cannot be used; nothing if it can, or if none was requested."""
        refused = None if self.kernel == "auto" else self._refusal(self.kernel, self.packed)
        if self.kernel in _TITLES and self.topk is not None:
            refused = f"it is to all tokens, not to {self.topk:,} that an indexer selects"
        if refused is None:
            return []
        return [Problem("memory.attention", f"'{self.kernel}' cannot serve: {refused}; use 'auto'")]

    def on(self, device: Any, name: str) -> Kernels:
        """The same on devices like this one.

        Args:
            device: One of jax's devices.
            name: Of the experiment.

        Raises:
            PlanError: The kernel that is set does not run on them.
        """
        capability = getattr(device, "compute_capability", None)
        found = attrs.evolve(self, capability=None if capability is None else float(capability))
        if problems := found.problems():
            raise PlanError(problems, f"Experiment '{name}'")
        return found

    def _refusal(self, kernel: Kernel, packed: bool) -> str | None:
        if kernel == "dense":
            return None
        if self.length_shards > 1:
            return f"the tokens of a row are split over {self.length_shards} devices; only the dense product spans them"
        if kernel == "chunked":
            return None
        title = _TITLES[kernel]
        if self.platform != _PLATFORMS[kernel]:
            return f"{title} runs on a {_PLATFORMS[kernel].upper()}, this program on a {self.platform.upper()}"
        if packed:
            return f"{title} cannot tell the sequences of a packed row apart"
        if self.stages > 1:
            return f"{title} is not computed in a pipeline's stages"
        if self.sinks:
            return f"{title} has no sinks"
        if self.has_chunks:
            return f"{title} has no chunks"
        if self.has_local_heads:
            return f"{title} needs query heads and key/value heads split alike"
        if kernel == "cudnn":
            return self._refusal_of_cudnn()
        return None

    def _refusal_of_cudnn(self) -> str | None:
        title, widest = _TITLES["cudnn"], _WIDEST
        if self.capability is not None and self.capability < 9.0:
            widest = _OLDER_WIDEST
        if self.dtype not in ("bfloat16", "float16"):
            return f"{title} computes in bfloat16 or float16, this program in {self.dtype}"
        if self.head_dim % 8 or self.head_dim > widest:
            return f"{title} needs heads of a multiple of 8 and at most {widest}, these are {self.head_dim} wide"
        if self.soft_cap:
            return f"{title} has no soft cap of scores"
        return None


_TITLES: dict[Kernel, str] = {"cudnn": "cuDNN's attention", "splash": "splash attention"}
_PLATFORMS: dict[Kernel, str] = {"cudnn": "gpu", "splash": "tpu"}


def kernels(
    kernel: Attention, platform: str, compute: DTypeLike, config: DecoderConfig, layout: Layout, *, packed: bool
) -> Kernels:
    """What the choice of a program's kernel goes by.

    Args:
        kernel: `Memory.attention`.
        platform: "cpu", "gpu" or "tpu".
        compute: Dtype that is computed in.
        config: The network's numbers.
        layout: Where everything lives.
        packed: Whether rows are packed.
    """
    heads = (("activation_heads", config.num_heads), ("activation_kv_heads", config.num_kv_heads))
    targets = [layout.resolve((axis,), (size,)).spec[0] for axis, size in heads]
    indexer = None if config.mla is None else config.mla.indexer
    return Kernels(
        kernel,
        platform,
        str(compute),
        max(config.of(kind).head_dim for kind in config.layers),
        config.attention_soft_cap is not None,
        layout.length_shards,
        layout.stages,
        len({pieces(target, layout.mesh.sizes) for target in targets}) > 1,
        packed,
        config.sinks,
        config.window_kind == "chunks" and "local" in config.layers,
        indexer.topk if indexer is not None and indexer.selects else None,
    )
