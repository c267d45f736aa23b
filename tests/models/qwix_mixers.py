"""Adapters and quantized weights that qwix puts on a token mixer from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.attention.view import View


def check_from_outside(plain: Callable[[], Any], names: Sequence[str], view: View) -> None:
    """On these linear layers and nothing else; with B zero the adapters change nothing.

    Args:
        plain: the mixer, of 32 features.
        names: of its linear layers.
        view: of a row of 5 tokens.
    """
    rule: dict[str, Any] = {"module_path": "|".join(names), "weight_qtype": "nf4", "tile_size": 16}
    inputs = jnp.ones((1, 5, 32)), view, None

    def tuned() -> Any:
        provider = qwix.LoraProvider([qwix.LoraRule(**rule, rank=2, alpha=2.0)])
        return qwix.apply_lora_to_model(plain(), provider, *inputs, rngs=nnx.Rngs(1))

    def base() -> Any:
        return qwix.quantize_model(plain(), qwix.PtqProvider([qwix.QuantizationRule(**rule)]), *inputs)

    policy, frozen = params.abstract(tuned), params.abstract(base)
    matched = [re.fullmatch(r"(\w+)\.kernel_lora_[ab]", path) for path in policy.variables]
    assert {match[1] for match in matched if match} == set(names)
    assert sum(path.endswith("qvalue") for path in policy.variables) == len(names)

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        leaves = params.flatten(base())
        adapters = {
            path: jnp.full(leaf.shape, float(path.endswith("_a")), leaf.dtype)
            for path, leaf in policy.variables.items()
            if "_lora_" in path
        }
        one: Any = policy.merge(leaves | adapters)
        other: Any = frozen.merge(leaves)
        return one(x, *inputs[1:])[0], other(x, *inputs[1:])[0]

    mine, wanted = run(jax.random.normal(jax.random.key(0), (1, 5, 32)))
    assert float(jnp.abs(wanted).max()) > 0.1
    np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)
