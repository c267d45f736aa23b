"""What a policy's answers take on each device while they are drawn, from shapes alone."""

from __future__ import annotations

import math

import attrs
import jax

from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.program.batch_shapes import Lengths
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.sharding.layout import bits


@attrs.frozen
class Drawn:
    """What is on one device while answers are drawn.

    Attributes:
        rows: Answers.
        tokens: Of the longest prompt with the longest answer.
        cache: Bytes of the keys and values of all of them.
        copies: Bytes of trained weights in the dtype that is computed in, where that is not float32.
    """

    rows: int
    tokens: int
    cache: int
    copies: int


def drawn(blueprint: Blueprint, longest: Lengths) -> Drawn:
    """What the answers of one step take on one device; heads are taken to be whole on each."""
    size, compute = blueprint.experiment.batch_size, blueprint.compute
    rows = math.ceil(size / blueprint.layout.batch_shards(size))
    held = jax.tree.leaves(jax.eval_shape(lambda: init_cache(blueprint.config, rows, longest.trunk, compute)))
    cache = sum(math.prod(leaf.shape) * bits(leaf.dtype.name) // 8 for leaf in held)
    trainable = blueprint.layout.device_bytes().get("trainable", 0)
    return Drawn(rows, longest.trunk, cache, 0 if compute.itemsize == 4 else trainable * compute.itemsize // 4)
