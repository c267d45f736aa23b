"""Dropout whose masks depend on the row, the token's position, the layer and the module, not on the array's layout.

So a step drops the same numbers on every mesh, with any number of micro-batches, and after a resume. It is active while
a model is traced within `dropping`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.models.attention.positions import TokenPositions

BRANCHES = 1 << 24
"""Positions that a branch of a row may have; the branches of a row follow each other."""
TAIL, LEAD = (1 << 31) + 1, (1 << 31) + 2
"""Numbers of the layers outside the stack, whose own are 0, 1, 2, ..."""


@attrs.define
class _Dropping:
    rows: jax.Array
    is_on: jax.Array | bool
    tokens: jax.Array | None = None
    layer: jax.Array | int = 0


_current: ContextVar[_Dropping | None] = ContextVar("dropping", default=None)


@contextmanager
def dropping(rows: jax.Array | None, is_on: jax.Array | bool = True) -> Iterator[None]:
    """Activates `dropped` within the context.

    Args:
        rows: a key for each row `[B]` of the tokens that a decoder is called with; None for no dropout.
        is_on: whether anything is dropped; may be traced, so that training and evaluation share a program.
    """
    token = _current.set(None if rows is None else _Dropping(rows, is_on))
    try:
        yield
    finally:
        _current.reset(token)


def stamp(places: TokenPositions) -> None:
    """Sets the positions of a decoder's tokens `[B, T]`; no effect outside of `dropping`."""
    dropout = _current.get()
    if dropout is not None:
        token_numbers = places.branch_ids * BRANCHES + places.positions
        dropout.tokens = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(
            dropout.rows, token_numbers.astype(jnp.uint32)
        )


def layer_numbers(count: int, first: int = 0) -> jax.Array | None:
    """`[count]` numbers of stacked layers from `first` on, for a scan over them; None outside of `dropping`."""
    return None if _current.get() is None else jnp.arange(first, first + count, dtype=jnp.uint32)


@contextmanager
def at_layer(number: jax.Array | int | None) -> Iterator[None]:
    """Sets the number of the current layer within the context."""
    dropout = _current.get()
    if dropout is None or number is None:
        yield
        return
    before, dropout.layer = dropout.layer, number
    try:
        yield
    finally:
        dropout.layer = before


def dropped(x: jax.Array, rate: float, salt: int) -> jax.Array:
    """Drops activations: each is 0 with probability `rate`, the others are divided by `1 - rate`.

    Args:
        x: `[B, T, D]`, or `[B * T, D]`.
        rate: below 1.
        salt: differs between the modules of a layer.

    Raises:
        ValueError: the shape of `x` does not match the decoder's tokens.
    """
    dropout = _current.get()
    if dropout is None or not rate:
        return x
    if dropout.tokens is None or dropout.tokens.size * x.shape[-1] != x.size:
        raise ValueError(f"dropout of activations {x.shape} that are not those of the decoder's tokens")
    where = jnp.uint32(salt), jnp.asarray(dropout.layer, jnp.uint32)

    def bits(key: jax.Array) -> jax.Array:
        for number in where:
            key = jax.random.fold_in(key, number)
        return jax.random.bits(key, x.shape[-1:], jnp.uint32)

    keys = dropout.tokens if x.ndim == 3 else dropout.tokens.reshape(-1)
    for _ in range(x.ndim - 1):
        bits = jax.vmap(bits)
    is_on = jnp.asarray(dropout.is_on)
    keep_mask = (bits(keys) >= jnp.uint32(round(rate * 2**32))) | ~is_on
    factor = jnp.where(is_on, 1 / (1 - rate), 1.0).astype(x.dtype)
    return jnp.where(keep_mask, x * factor, jnp.zeros((), x.dtype))
