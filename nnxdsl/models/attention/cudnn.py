"""cuDNN's fused attention for GPUs.

cuDNN supports rows that begin at their first slot, sequence lengths, and causal masks with a window. So the row of a
pair becomes two rows, `[prompt | chosen]` and `[prompt | rejected]`, each shifted to its first slot, and the output is
shifted back; the prompt's queries, equal in both, are taken from the first. Tests on CPUs run XLA's attention in place
of cuDNN's.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.fused import FusedKernel
from nnxdsl.models.attention.kernel import CompileTarget, ScoreOptions
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig

_WIDEST = 256
_OLDER_WIDEST = 128  # before compute capability 9.0


class CuDNN(FusedKernel):
    """`attend_cudnn`."""

    name = "cudnn"
    title = "cuDNN's attention"
    platform = "gpu"

    def supports(self, row: RowLayout, config: DecoderConfig, target: CompileTarget) -> str | None:
        """See `AttentionKernel`."""
        if refused := super().supports(row, config, target):
            return refused
        widest = _OLDER_WIDEST if target.capability is not None and target.capability < 9.0 else _WIDEST
        width = max(config.of(kind).head_dim for kind in config.layers.kinds)
        if target.dtype not in ("bfloat16", "float16"):
            return f"{self.title} computes in bfloat16 or float16, this program in {target.dtype}"
        if width % 8 or width > widest:
            return f"{self.title} needs heads of a multiple of 8 and at most {widest}, these are {width} wide"
        if config.attention.soft_cap is not None:
            return f"{self.title} has no soft cap of scores"
        return None

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        """See `AttentionKernel`; keys and values are padded to one width, which the kernel needs."""
        self.require_plain(view, scores)
        if scores.soft_cap is not None:
            raise ValueError("cuDNN's attention has no soft cap")
        method, widths = view.method, (key.shape[-1], value.shape[-1])
        assert method.row is not None  # the decoder refuses other kernels without a layout of the row
        if widths[0] != widths[1]:
            query, key, value = (
                jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, max(widths) - part.shape[-1])))
                for part in (query, key, value)
            )
        mixed = attend_cudnn(query, key, value, view.positions, method.row, window=method.window, scale=scores.scale)
        return mixed[..., : widths[1]]


def attend_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: TokenPositions,
    row: RowLayout,
    *,
    window: int | None,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Grouped-query self-attention, equal to `dot_product_attention` for every real token.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, H]`.
        places: positions of the row's tokens, `[B, T]`.
        row: layout of the row; not packed.
        window: see `attention_mask`.
        scale: factor of the scores.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        `[B, T, N, H]` in the dtype of `query`; zero for padding.
    """
    if row.packed:
        raise ValueError("cuDNN's attention has no segments, so it cannot compute packed rows")
    real = places.segment_ids > 0  # [B, T]
    # Unused slots of the kernel's output and gradients are masked.
    query, key, value = (jnp.where(real[:, :, None, None], x, 0) for x in (query, key, value))
    lengths = [jnp.sum(part, axis=1) for part in _parts(real, row)]  # each [B]
    first, *others = lengths
    if not others:
        mixed = _causal(query, key, value, first, window, scale, implementation)
    else:
        shift = row.parts[0] - first  # slots of padding before the prompt
        lengths = jnp.stack([first + other for other in others], axis=1)  # [B, 2]
        rows = (_rolled(_two_rows(x, row), shift) for x in (query, key, value))  # each [B, 2, P + R, heads, H]
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in rows)  # the rows of a pair stay on one device
        mixed = _causal(query, key, value, lengths.reshape(-1), window, scale, implementation)
        mixed = _one_row(_rolled(mixed.reshape(*lengths.shape, *mixed.shape[1:]), -shift), row)
    return jnp.where(real[:, :, None, None], mixed, 0)


def _causal(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
    window: int | None,
    scale: float,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """Causal attention of rows that begin at their first slot."""
    size = query.shape[1]
    if size % 2:  # jax refuses a gradient of cuDNN's attention over an odd number of slots
        query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
    length = jnp.maximum(length, 1).astype(jnp.int32)  # an empty row would be 0 / 0
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return mixed[:, :size]


def _parts(x: jax.Array, row: RowLayout) -> list[jax.Array]:
    """The parts of a row's slots `[B, T, ...]`."""
    parts, start = [], 0
    for size in row.parts:
        parts.append(x[:, start : start + size])
        start += size
    return parts


def _two_rows(x: jax.Array, row: RowLayout) -> jax.Array:
    """`[B, P + 2R, ...]` to `[B, 2, P + R, ...]`: the prompt with each completion."""
    prompt, *completions = _parts(x, row)
    return jnp.stack([jnp.concatenate([prompt, completion], axis=1) for completion in completions], axis=1)


def _one_row(x: jax.Array, row: RowLayout) -> jax.Array:
    """The inverse of `_two_rows`, with the prompt of the first row, and zeros in unused slots."""
    prompt = row.parts[0]
    unused = jnp.zeros((len(x), row.size - sum(row.parts), *x.shape[3:]), x.dtype)
    return jnp.concatenate([x[:, 0, :prompt], *(x[:, one, prompt:] for one in range(x.shape[1])), unused], axis=1)


@jax.custom_vjp
def _rolled(x: jax.Array, shift: jax.Array) -> jax.Array:
    """Rolls the slots of `[B, 2, L, ...]` by `shift` `[B]`: slot s + shift moves to slot s."""
    slots = (jnp.arange(x.shape[2])[None, :] + shift[:, None]) % x.shape[2]  # [B, L]
    return jax.vmap(lambda rows, slots: jnp.take(rows, slots, axis=1, mode="clip"))(x, slots)


def _rolled_forward(x: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rolled(x, shift), shift


def _rolled_backward(shift: jax.Array, toward: jax.Array) -> tuple[jax.Array, None]:
    # The inverse permutation; autodiff would make a scatter-add.
    return _rolled(toward, -shift), None


_rolled.defvjp(_rolled_forward, _rolled_backward)
