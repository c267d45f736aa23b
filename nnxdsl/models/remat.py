"""What the backward pass keeps of a forward pass, by the names of tensors; the rest it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["none", "products", "attention", "inputs", "offload", "full"]
POLICIES: tuple[Remat, ...] = get_args(Remat)

Name = Literal["product", "attention_output", "layer_input"]
"""What has a name: the output of each linear layer, what attention mixed before it is projected, the residual stream
where a layer begins."""

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
"""How much of the forward pass the backward pass computes again: of the linear layers, and of attention (two products,
of which its output is the second)."""


def named(x: jax.Array, name: Name) -> jax.Array:
    """The same values, under a name by which a policy may keep them."""
    return checkpoint_name(x, name)


def from_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, of which the backward pass keeps what it was given, and computes the rest again, whatever the policy.

    For what is cheap to compute, and would otherwise keep several arrays of the size of its result.

    Args:
        function: of arrays of floats, all of which are positional; what else it knows is static.
    """

    def back(given: tuple[jax.Array, ...], toward: jax.Array) -> tuple[jax.Array, ...]:
        # Without a barrier XLA sees the same values in the forward pass, and keeps these after all.
        return jax.vjp(function, *jax.lax.optimization_barrier(given))[1](toward)

    run = jax.custom_vjp(function)
    run.defvjp(lambda *given: (function(*given), given), back)
    return run


def with_remat(run: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`run`, of which the backward pass keeps what `remat` says (Chen et al., arXiv:1604.06174).

    Args:
        run: layers of a decoder; its arguments are kept by all policies but "offload".
        remat: "none" keeps all but what is `from_inputs`; "products" the outputs of linear layers, so that only what is
            cheap, and attention, is computed again; "attention" the input of each layer and what its attention mixed;
            "inputs" the input of each layer; "offload" the same in the host's memory; "full" nothing.

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
