"""Quantization of frozen weights, and of products with trained ones; qwix computes it: `nnxdsl/adapters`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.adapter import our_names, target_problems
from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import positive
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import quantization as members
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Quantization(Spec):
    """Quantized weights of linear layers: frozen ones are stored so, products with trained ones are computed so.

    Attributes:
        block_size: How many inputs of a weight share a scale; None for all inputs of an output.
        targets: Which linear layers: names of modules or of groups of them.
    """

    NF4: ClassVar[type[members.NF4]]
    Int8: ClassVar[type[members.Int8]]
    Int4: ClassVar[type[members.Int4]]
    FP8: ClassVar[type[members.FP8]]
    QAT: ClassVar[type[members.QAT]]
    Int8Training: ClassVar[type[members.Int8Training]]
    FP8Training: ClassVar[type[members.FP8Training]]

    freezes: ClassVar[bool] = True
    """Whether the weights are stored quantized, and so cannot be trained."""
    weight_dtype: ClassVar[str] = ""
    """Where they are: the dtype of the stored values, "nf4" or a name of `jax.numpy`."""

    block_size: int | None = attrs.field(default=None, validator=positive)
    targets: tuple[str, ...] = ("attention", "mlp")

    def problems(self) -> Iterable[Problem]:
        """Targets are not empty and unique."""
        return target_problems(self.targets)

    def identity_values(self) -> Mapping[str, object]:
        """Layers by our names, whichever they were given by."""
        return {"targets": our_names(self.targets)}

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Something is trained: an adapter where the format freezes the base, the weights themselves where not."""
        kind, adapter = type(self).__qualname__, experiment.adapter
        if not self.freezes and adapter is not None:
            message = f"{kind} is for weights that are trained, {type(adapter).__qualname__} freezes them; "
            yield Problem("quantization", message + "use Quantization.Int8()")
        elif self.freezes and adapter is None:
            message = f"{kind} freezes the base, so there is nothing to train without an adapter; "
            yield Problem("quantization", message + "add adapter=Adapter.LoRA()")


@attrs.frozen(kw_only=True)
class InBlocks(Quantization):
    """A storage format of frozen weights.

    Attributes:
        block_size: How many inputs of a weight share a scale.
    """

    is_base: ClassVar[bool] = True

    block_size: int = attrs.field(default=64, validator=positive)


@attrs.frozen(kw_only=True)
class NF4(InBlocks):
    """Four-bit normal floats (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""

    weight_dtype: ClassVar[str] = "nf4"


@attrs.frozen(kw_only=True)
class Int8(InBlocks):
    """Eight-bit integers, symmetric, scaled by the largest magnitude of each block."""

    weight_dtype: ClassVar[str] = "int8"


@attrs.frozen(kw_only=True)
class Int4(InBlocks):
    """Four-bit integers, symmetric, scaled by the largest magnitude of each block."""

    weight_dtype: ClassVar[str] = "int4"


@attrs.frozen(kw_only=True)
class FP8(InBlocks):
    """Eight-bit floats, e4m3: four bits of exponent (Micikevicius et al. 2022, arXiv:2209.05433), scaled by block."""

    weight_dtype: ClassVar[str] = "float8_e4m3fn"


@attrs.frozen(kw_only=True)
class QAT(Quantization):
    """Quantization-aware training (Jacob et al. 2018, arXiv:1712.05877): all weights are trained, in float32.

    The forward pass computes with weights that are rounded as they would be stored afterwards; gradients pass through
    the rounding as if it were not there, and are not rounded.

    Attributes:
        weights: What weights are rounded to.
        activations: What the inputs of those layers are rounded to, each token scaled by itself; None leaves them.
    """

    freezes: ClassVar[bool] = False

    weights: Literal["int4", "int8", "fp8"] = "int8"
    activations: Literal["int8", "fp8"] | None = None


@attrs.frozen(kw_only=True)
class Int8Training(Quantization):
    """All products of linear layers in eight-bit integers: weights, activations and gradients; weights stay float32."""

    freezes: ClassVar[bool] = False


@attrs.frozen(kw_only=True)
class FP8Training(Quantization):
    """All products of linear layers in eight-bit floats; weights stay float32 (Micikevicius et al. 2022).

    Weights and activations are e4m3, gradients, which need range more than digits, e5m2 (arXiv:2209.05433).
    """

    freezes: ClassVar[bool] = False
