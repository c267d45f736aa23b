"""Adapters and few-bit weights put on a model from outside: the one place that imports qwix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from nnxdsl.models.config import DecoderConfig
from nnxdsl.models.decoder import Period, example_inputs
from nnxdsl.models.experts import ExpertLinear, expert_dot
from nnxdsl.models.layers import Linear
from nnxdsl.models.tree import Leaf, Template, within
from nnxdsl.program.layout import starred
from nnxdsl.spec.adapter import Adapter, LoRA
from nnxdsl.spec.errors import NotRegisteredError, Problem, suggest
from nnxdsl.spec.quantization import NF4, Int8, Quantization

A, B = "_lora_a", "_lora_b"
QVALUE, SCALE = ".array.qvalue", ".array.scale"


def qtype(quantization: Quantization) -> Any:
    """The name or dtype by which qwix knows a quantization."""
    match quantization:
        case NF4():
            return "nf4"
        case Int8():
            return jnp.int8
        case _:
            raise NotRegisteredError(f"{type(quantization).__qualname__} has no qwix type; add it to adapters.qtype")


def matches(target: str, path: str) -> bool:
    """Whether a target such as "attention" or "mlp.up" names the module at a dotted path, or a module around it."""
    return f".{target}." in f".{path}."


def adapt(
    adapter: Adapter | None, quantization: Quantization | None, config: DecoderConfig
) -> Callable[[Period], Period]:
    """The function that a `Decoder` applies to one period before it stacks it.

    Args:
        adapter: What to add, or None.
        quantization: What to quantise, or None.
        config: Of the decoder, for the example inputs that qwix runs the period on.

    Returns:
        A function from a period to one with the adapters' Variables, and with quantised weights.
    """
    if adapter is not None and not isinstance(adapter, LoRA):
        raise NotRegisteredError(
            f"{type(adapter).__qualname__}: nothing knows how to put it on a model; use Adapter.LoRA"
        )

    def apply(period: Period) -> Period:
        dtype = next(p.get_value().dtype for _, p in nnx.to_flat_state(nnx.state(period)))
        modules = [(path, ".".join(map(str, path)), module) for path, module in nnx.iter_modules(period)]
        for path, name, module in modules:
            lora = adapter if _targeted(name, adapter) else None
            few = quantization if _targeted(name, quantization) else None
            if isinstance(module, ExpertLinear) and (lora or few):
                setattr(reduce(_inside, path[:-1], period), str(path[-1]), AdaptedExperts(module, lora, few))
        paths = [name for _, name, module in modules if isinstance(module, Linear)]
        rules = [rule for path in paths if (rule := _rule(path, adapter, quantization))]
        if rules:
            # The example has the weights' dtype: a cast between weight and product would hide the weight from qwix.
            inputs = example_inputs(config, dtype)
            changed = qwix.apply_lora_to_model(period, qwix.LoraProvider(rules), *inputs, rngs=nnx.Rngs(0))
            assert isinstance(changed, Period)
            period = changed
        for path, variable in nnx.to_flat_state(nnx.state(period)):
            _name_axes(".".join(map(str, path)), variable)
        return period

    return apply


def _inside(node: Any, part: Any) -> Any:
    return node[part] if isinstance(part, int) else getattr(node, part)


def _rule(path: str, adapter: Adapter | None, quantization: Quantization | None) -> Any:
    frozen: dict[str, Any] = {}
    if quantization is not None and _targeted(path, quantization):
        frozen = {"weight_qtype": qtype(quantization), "tile_size": quantization.block_size}
    module_path = re.escape(path.replace(".", "/"))
    if isinstance(adapter, LoRA) and _targeted(path, adapter):
        return qwix.LoraRule(module_path=module_path, rank=adapter.rank, alpha=adapter.alpha, **frozen)
    return qwix.QuantizationRule(module_path=module_path, **frozen) if frozen else None


def _name_axes(path: str, variable: nnx.Variable) -> None:
    """Give an adapter's or a scale's Variable its own logical axes: qwix copies those of the weight."""
    axes = variable.get_metadata().get("axes")
    if not path.endswith((A, B, SCALE)) or axes is None:
        return
    *experts, inputs, outputs = axes
    if path.endswith(A):
        variable.set_metadata(axes=(*experts, inputs, "rank"))
    elif path.endswith(B):
        variable.set_metadata(axes=(*experts, "rank", outputs))
    else:
        variable.set_metadata(axes=(*experts, "blocks", outputs))


class FewBits(nnx.Module):
    """A weight `[..., in, out]` as `quantise` makes it, where qwix would have put its own: same leaves, same paths."""

    def __init__(self, weight: nnx.Variable, quantization: Quantization) -> None:
        axes = weight.get_metadata().get("axes")
        array = _in_few_bits(weight.get_value(), quantization)
        self.array = jax.tree.map(lambda part: nnx.Param(part, axes=axes), array)

    def restored(self) -> jax.Array:
        """The weight that the few bits stand for."""
        return _restored(jax.tree.map(lambda part: part[...], self.array, is_leaf=_is_variable))


class AdaptedExperts(ExpertLinear):
    """An ExpertLinear whose kernel has an adapter beside it, or few bits, or both.

    qwix 0.1.8 puts neither on `jax.lax.ragged_dot`, and one B for all experts on an einsum. So this one takes the
    place of the module, with leaves of the same names and, for each expert, the same mathematics as qwix's.

    Args:
        plain: the module whose place it takes.
        adapter: what stands beside each expert's kernel; None for nothing.
        quantization: what the kernel is kept in; None as it is.
    """

    def __init__(self, plain: ExpertLinear, adapter: LoRA | None, quantization: Quantization | None) -> None:
        kernel = plain.kernel
        self.bias = plain.bias
        self.kernel = kernel if quantization is None else FewBits(kernel, quantization)
        self.scale = None if adapter is None else adapter.alpha / adapter.rank
        if adapter is not None:
            (*experts, inputs, outputs), axes = kernel.shape, kernel.get_metadata().get("axes")
            first, key = ((*experts, inputs, adapter.rank), jax.random.key(0))
            second = (*experts, adapter.rank, outputs)
            self.kernel_lora_a = nnx.LoRAParam(initial(A, first, key).astype(kernel.dtype), axes=axes)
            self.kernel_lora_b = nnx.LoRAParam(initial(B, second, key).astype(kernel.dtype), axes=axes)

    def product(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """`x @ (kernel + scale * A B)` of each slot's expert, in the dtype of `x`."""
        if isinstance(self.kernel, FewBits):
            few = self.kernel
            # Unpacked again for the backward pass: what is unpacked is as large as the weight was before.
            result = jax.checkpoint(lambda x: expert_dot(x, few.restored(), expert))(x)
        else:
            result = super().product(x, expert)
        if self.scale is None:
            return result
        low = expert_dot(x, self.kernel_lora_a[...], expert, axis=None)  # [B, T, k, rank]
        return result + self.scale * expert_dot(low, self.kernel_lora_b[...], expert)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def is_adapter(path: str) -> bool:
    """Whether a path is an adapter's."""
    return path.endswith((A, B))


def off(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same leaves with adapters that add nothing: those of the base."""
    return {path: jnp.zeros_like(leaf) if path.endswith(B) else leaf for path, leaf in leaves.items()}


def problems(adapter: Adapter | None, quantization: Quantization | None, base: Mapping[str, Leaf]) -> list[Problem]:
    """Targets that match no linear layer of the model, and weights that blocks do not divide."""
    linears = {
        _in_period(path).removesuffix(".kernel"): leaf for path, leaf in base.items() if path.endswith(".kernel")
    }
    names = {part for path in linears for part in path.split(".")[2:]}
    found: list[Problem] = []
    for where, spec in (("adapter", adapter), ("quantization", quantization)):
        for index, target in enumerate(getattr(spec, "targets", ())):
            if not any(matches(target, path) for path in linears):
                message = f"'{target}' matches no linear layer{suggest(target, names)}"
                found.append(Problem(f"{where}.targets.{index}", message))
    if quantization is not None:
        block = quantization.block_size
        sizes = {starred(path): leaf.shape[-2] for path, leaf in linears.items() if _targeted(path, quantization)}
        found += [
            Problem("quantization.block_size", f"{size} inputs of {path} are not divisible by blocks of {block}")
            for path, size in sizes.items()
            if size % block
        ]
    return found


def missed(
    adapter: Adapter | None, quantization: Quantization | None, template: Template, base: Mapping[str, Leaf]
) -> list[Problem]:
    """Targeted layers that were left as they were: qwix passes over what it does not recognise without a word."""
    found: list[Problem] = []
    for where, spec, ending in (("adapter", adapter, A), ("quantization", quantization, QVALUE)):
        found += [
            Problem(f"{where}.targets", f"{path} was targeted but is unchanged")
            for path in base
            if path.endswith(".kernel")
            and _targeted(_in_period(path), spec)
            and path + ending not in template.variables
        ]
    return found


def _targeted(path: str, spec: Adapter | Quantization | None) -> bool:
    return any(matches(target, path) for target in getattr(spec, "targets", ()))


def _in_period(path: str) -> str:
    """The path of a layer's leaf within its period, which is what targets are matched with."""
    return within(path)


def quantise(weight: jax.Array, quantization: Quantization) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a weight `[..., in, out]`: a scale for each block of inputs and each output."""
    array = _in_few_bits(weight, quantization)
    return array.qvalue, array.scale


def rounded(weight: jax.Array, quantization: Quantization) -> jax.Array:
    """The weight `[..., in, out]` that its few bits stand for."""
    return _restored(_in_few_bits(weight, quantization))


def _restored(array: Any) -> jax.Array:
    restore = qwix.dequantize
    for _ in range(array.ndim - 2):
        restore = jax.vmap(restore)
    return restore(array)


def _in_few_bits(weight: jax.Array, quantization: Quantization) -> Any:
    def one(matrix: jax.Array) -> Any:
        return qwix.quantize(
            matrix, qtype(quantization), channelwise_axes=(1,), tiled_axes={0: quantization.block_size}
        )

    for _ in range(weight.ndim - 2):
        one = jax.vmap(one)
    return one(weight)


def initial(path: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """First value of an adapter's leaf, float32: A is He-uniform over its inputs (He et al. 2015), B is zero."""
    if path.endswith(B):
        return jnp.zeros(shape, jnp.float32)
    bound = (6.0 / shape[-2]) ** 0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def merge(adapter: LoRA, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The weight with its adapter in it, `W + (alpha / rank) A B`, in float32.

    Args:
        adapter: Gives alpha and rank.
        weight: `[..., in, out]`.
        a: `[..., in, rank]`.
        b: `[..., rank, out]`.
    """
    product = jnp.einsum("...ir,...ro->...io", a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return weight.astype(jnp.float32) + (adapter.alpha / adapter.rank) * product
