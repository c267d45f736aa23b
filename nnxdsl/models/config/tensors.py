"""Names of a checkpoint's tensors as plain data: which of them make an array of a decoder; no jax."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class TensorSource:
    """The tensors, by names without prefix, that make one array.

    Attributes:
        names: in the order of the array's leading axes, the last of which changes fastest.
        leading: lengths of the array's axes that the tensors do not have: groups of layers, experts.
        transposed: whether the tensor's last two axes are swapped: torch stores the weights of linear layers as
            [out, in].
        share: (n, count): the tensor interleaves so many arrays along its last axis, and this is number n of them.
        columns: (start, stop, total): the tensor joins several arrays along the array's last axis, of `total` columns,
            and these are its own; None where the tensor is of this array alone.
        unit: whether the tensor has an axis of length 1 before those of the array.
    """

    names: tuple[str, ...]
    leading: tuple[int, ...] = ()
    transposed: bool = False
    share: tuple[int, int] = (0, 1)
    columns: tuple[int, int, int] | None = None
    unit: bool = False

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, for the shape of the array."""
        part = shape[len(self.leading) :]
        if self.unit:
            return (1, *part)
        if not part:
            return part
        *others, last = part
        last = last * self.share[1] if self.columns is None else self.columns[2]
        return (*others[:-1], last, others[-1]) if self.transposed else (*others, last)


def linears(names: Mapping[str, str]) -> dict[str, TensorSource]:
    """Sources of linear layers' kernels: from our module's path to the file's."""
    return {f"{ours}.kernel": TensorSource((f"{theirs}.weight",), transposed=True) for ours, theirs in names.items()}


def joined(name: str, widths: Mapping[str, int], *, transposed: bool = True) -> dict[str, TensorSource]:
    """Sources of arrays that one tensor of a file joins along their last axis.

    Args:
        name: the file's name of the tensor.
        widths: by our path of each array, in the order of the file: the length of its last axis.
        transposed: see `TensorSource`.
    """
    parts, start, total = {}, 0, sum(widths.values())
    for path, width in widths.items():
        parts[path] = TensorSource((name,), transposed=transposed, columns=(start, start + width, total))
        start += width
    return parts


def biases(names: Mapping[str, str]) -> dict[str, TensorSource]:
    """Sources of linear layers' biases."""
    return {f"{ours}.bias": TensorSource((f"{theirs}.bias",)) for ours, theirs in names.items()}


def norms(names: Mapping[str, str]) -> dict[str, TensorSource]:
    """Sources of norms' scales."""
    return {f"{ours}.scale": TensorSource((f"{theirs}.weight",)) for ours, theirs in names.items()}


@attrs.frozen(kw_only=True)
class MTPTensors:
    """Names of the multi-token-prediction (MTP) layer's tensors; the defaults are those of DeepSeek-V3.

    Attributes:
        around: of the norm of the next token's embedding, the norm of the hidden state, the projection, the last norm.
        prefix: before those names; `{}` is the number of the decoder's layers.
        block_prefix: before the names of its block.
        has_copies: whether it stores the embedding and the head a second time.
        is_default: whether a `config.json` without `num_nextn_predict_layers` may have the layer.
    """

    around: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    prefix: str = "layers.{}."
    block_prefix: str = "layers.{}."
    has_copies: bool = True
    is_default: bool = False
