"""Rematerialization: the named tensors of the forward pass that are saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["none", "products", "attention", "inputs", "offload", "full"]
POLICIES: tuple[Remat, ...] = get_args(Remat)

Name = Literal["product", "attention_output", "layer_input"]
"""Named tensors: the output of each linear layer, attention's output before its projection, the input of each layer."""

_SAVED_NAMES: dict[Remat, tuple[Name, ...]] = {
    "products": ("product",),
    "attention": ("layer_input", "attention_output"),
    "inputs": ("layer_input",),
    "full": (),
}


AGAIN: dict[Remat, tuple[float, float]] = {
    "none": (0, 0),
    "products": (0, 1),
    "attention": (1, 0.5),
    "inputs": (1, 1),
    "offload": (1, 1),
    "full": (1, 1),
}
"""The share of the forward pass that is recomputed: of the linear layers, and of attention (two products, of which its
output is the second)."""


def named(x: jax.Array, name: Name) -> jax.Array:
    """Names a tensor, so that a policy can save it."""
    return checkpoint_name(x, name)


def from_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, which the backward pass recomputes from its inputs under every policy.

    For cheap functions that would otherwise save several arrays of the size of their result.

    Args:
        function: of positional float arrays; everything else in it is static.
    """

    def back(inputs: tuple[jax.Array, ...], toward: jax.Array) -> tuple[jax.Array, ...]:
        # Without the barrier XLA merges this with the forward pass, and saves the intermediate values after all.
        return jax.vjp(function, *jax.lax.optimization_barrier(inputs))[1](toward)

    run = jax.custom_vjp(function)
    run.defvjp(lambda *inputs: (function(*inputs), inputs), back)
    return run


def with_remat(run: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`run` with a rematerialization policy (Chen et al., arXiv:1604.06174).

    Args:
        run: layers of a decoder; its arguments are saved by all policies but "offload".
        remat: "none" saves everything but the inside of `from_inputs`; "products" the outputs of linear layers, so that
            attention and cheap functions are recomputed; "attention" the input of each layer and attention's output;
            "inputs" the input of each layer; "offload" the same in host memory; "full" nothing.

    Raises:
        ValueError: an unknown policy.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return run
    if remat == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["layer_input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(run, policy=policy)
    if remat not in _SAVED_NAMES:
        raise ValueError(f"remat: expected one of {', '.join(map(repr, POLICIES))}, got {remat!r}")
    return jax.checkpoint(run, policy=policies.save_only_these_names(*_SAVED_NAMES[remat]))
