"""Run by test_adapted_experts.py with eight CPU devices: a mixture of experts on one device and on meshes, as JSON."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxdsl import Mesh
from nnxdsl.models import params
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.logical_axes import sharding_hooks
from nnxdsl.models.moe.layer import ExpertMLP
from nnxdsl.models.moe.router import load_balance
from nnxdsl.sharding.layout import Array, Layout
from nnxdsl.sharding.mesh import device_mesh

EMBED, ROWS, TOKENS = 16, 8, 12
EXPERTS = MoEConfig(
    num_experts=8, num_experts_per_tok=3, mlp_dim=12, shared_expert_dim=8, shared_expert_gate=True, expert_bias=True
)
MESHES = {
    "expert8": Mesh(expert=8),
    "fsdp2-expert2-tensor2": Mesh(fsdp=2, expert=2, tensor=2),
    "data2-context2-tensor2": Mesh(data=2, context=2, tensor=2),
}


def main() -> None:
    """Prints, for each mesh, how far values and gradients are from those of one device, and how they lie."""
    template = params.abstract(
        lambda: ExpertMLP(EMBED, EXPERTS, MLPConfig(dim=8), rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    )
    rng = np.random.default_rng(0)
    values = {
        path: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)
        for path, leaf in template.variables.items()
    }
    x = jnp.asarray(rng.normal(size=(ROWS, TOKENS, EMBED)), jnp.float32)
    real = jnp.arange(TOKENS)[None] < jnp.asarray(rng.integers(3, TOKENS + 1, ROWS))[:, None]

    def gradient(values: dict[str, Any], x: jax.Array, real: jax.Array) -> Any:
        def loss(values: dict[str, Any], x: jax.Array) -> tuple[jax.Array, Any]:
            module: Any = template.merge(values)
            out, stats = module(x, real)
            return jnp.sum(jnp.sin(jnp.where(real[..., None], out, 0))) + load_balance(stats)[0], (out, stats)

        actual, (out, stats) = jax.grad(loss, (0, 1), has_aux=True)(values, x)
        return {"values": actual[0], "x": actual[1], "out": out, "stats": stats._asdict()}

    alone = jax.jit(gradient)(values, x, real)
    report = {}
    for name, asked in MESHES.items():
        arrays = {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in template.variables.items()}
        layout, mesh = Layout(asked, {"trainable": arrays}), device_mesh(asked, jax.devices())
        placed = {path: layout.sharding("trainable", path, mesh) for path in values}

        def constrained(
            values: dict[str, Any],
            x: jax.Array,
            real: jax.Array,
            layout: Layout = layout,
            mesh: jax.sharding.Mesh = mesh,
        ) -> Any:
            with sharding_hooks(layout.constrain(mesh), layout.shard_weights(mesh), layout.shard_map_call(mesh)):
                return gradient(values, layout.constrain(mesh)(x, ("batch", "length", "activation_embed")), real)

        run = jax.jit(constrained).lower(jax.device_put(values, placed), x, real).compile()
        result = run(jax.device_put(values, placed), x, real)
        report[name] = {
            "spec": str(tuple(layout.arrays["trainable"]["gate.kernel"].spec)),
            "difference": jax.tree.leaves(
                jax.tree.map(lambda a, b: float(jnp.abs(a - jax.device_get(b)).max()), alone, result)
            ),
            "flops": run.cost_analysis()["flops"],
        }
    report["one"] = {"flops": jax.jit(gradient).lower(values, x, real).compile().cost_analysis()["flops"]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
