"""The choice of the attention kernel of a program's rows, with its reasons."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import attrs
import numpy as np
from jax.typing import DTypeLike

from nnxdsl.errors import PlanError, Problem
from nnxdsl.models.attention.kernel import ANY_AXIS, AttentionKernel, CompileTarget
from nnxdsl.models.attention.kernels import KERNELS, find_kernel
from nnxdsl.models.attention.row_layout import QUERIES, AttentionMethod, RowLayout, packed, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.sharding.layout import Layout
from nnxdsl.sharding.rules import mesh_axes, pieces


class Choice(NamedTuple):
    """The name of a kernel, and why it is this one."""

    kernel: str
    why: str


@attrs.frozen
class Kernels:
    """Selects the kernel for rows of a layout.

    Attributes:
        config: The decoder.
        setting: `Memory.attention`.
        target: The devices that it is compiled for.
        packed: Whether rows are packed.
    """

    config: DecoderConfig
    setting: str = "auto"
    target: CompileTarget = CompileTarget()  # noqa: RUF009 - frozen
    packed: bool = False

    def choose(self, row: RowLayout | None) -> Choice:
        """The kernel for rows of this layout; None for slots of which nothing is known, as in a cache.

        A kernel that is set by name is used wherever it can compute the row: `problems` has the reasons if not this
        program.
        """
        if row is None:
            return Choice("dense", "KV cache: no static layout")
        if self.setting != "auto":
            return Choice(self.setting, "set by memory.attention")
        reasons: list[str] = []
        for kernel in KERNELS.values():
            if kernel.platform not in (None, self.target.platform):
                continue
            refused = self._refusal(kernel, row) or kernel.not_worth(row)
            if refused is None:
                return Choice(kernel.name, "; ".join(filter(None, [kernel.why(row), *reversed(reasons)])))
            reasons += [refused] if refused not in reasons else []
        raise AssertionError("the dense product computes every row")

    def method(self, row: RowLayout) -> AttentionMethod:
        """How attention over such rows is computed."""
        # Each block is code of its own, which compilers for GPUs and TPUs take seconds for.
        queries = QUERIES if self.target.platform == "cpu" else 4 * QUERIES
        return AttentionMethod(self.choose(row).kernel, row, queries=queries)

    def token_order(self, row: RowLayout) -> np.ndarray | None:
        """The order in which devices hold the slots of such rows, see `AttentionKernel`; None for that of the row."""
        shards = self.target.length_shards
        if shards == 1 or any(layer.is_recurrent for layer in self.config.specs.values()):
            return None  # recurrent layers read tokens in their order
        return find_kernel(self.choose(row).kernel).token_order(row.size, shards)

    def problems(self) -> list[Problem]:
        """Why the kernel that is set by name cannot be used; nothing if it can, or if none is set."""
        if self.setting == "auto":
            return []
        row = (packed if self.packed else sequence)(sys.maxsize)  # rows of any length
        refused = self._refusal(find_kernel(self.setting), row)
        if refused is None:
            return []
        return [Problem("memory.attention", f"'{self.setting}' cannot serve: {refused}; use 'auto'")]

    def on(self, device: Any, name: str) -> Kernels:
        """The same on devices like this one.

        Args:
            device: One of jax's devices.
            name: Of the experiment.

        Raises:
            PlanError: The kernel that is set does not run on them.
        """
        capability = getattr(device, "compute_capability", None)
        target = attrs.evolve(self.target, capability=None if capability is None else float(capability))
        kernels = attrs.evolve(self, target=target)
        if problems := kernels.problems():
            raise PlanError(problems, f"Experiment '{name}'")
        return kernels

    def _refusal(self, kernel: AttentionKernel, row: RowLayout) -> str | None:
        target = self.target
        if target.length_shards > 1 and kernel.length_axis not in (ANY_AXIS, target.length_axis):
            return (
                f"the tokens of a row are split over {target.length_shards} devices; only the dense product spans them"
            )
        if kernel.platform not in (None, target.platform):
            runs_on = str(kernel.platform).upper()
            return f"{kernel.title} runs on a {runs_on}, this program on a {target.platform.upper()}"
        return kernel.supports(row, self.config, target)


def name_problems(setting: str) -> list[Problem]:
    """Why there is no kernel of the name that `Memory.attention` sets; nothing if there is one."""
    try:
        if setting != "auto":
            find_kernel(setting)
    except ValueError as error:
        return [Problem("memory.attention", str(error))]
    return []


def compile_target(platform: str, compute: DTypeLike, config: DecoderConfig, layout: Layout) -> CompileTarget:
    """The devices that a program's attention is compiled for.

    Args:
        platform: "cpu", "gpu" or "tpu".
        compute: Dtype that is computed in.
        config: The decoder.
        layout: The sharding of everything.
    """
    heads = (("activation_heads", config.num_heads), ("activation_kv_heads", config.num_kv_heads))
    targets = [layout.resolve((axis,), (size,)).spec[0] for axis, size in heads]
    return CompileTarget(
        platform=platform,
        dtype=str(compute),
        length_axis="+".join(mesh_axes(layout.resolve(("batch", "length")).spec[1])) or None,
        length_shards=layout.length_shards,
        stages=layout.stages,
        splits_heads_alike=len({pieces(target, layout.mesh.sizes) for target in targets}) == 1,
    )
