"""What a run will do and what it takes on each device, before a device is touched."""

from __future__ import annotations

import math
from typing import Any

import attrs

from nnxdsl.models.config import DecoderConfig
from nnxdsl.program.blueprint import Blueprint, draw
from nnxdsl.program.shapes import Lengths, lengths
from nnxdsl.spec.experiment import Experiment


@attrs.frozen
class Part:
    """Bytes on one device for one purpose, how they were found ("exact" or "estimated"), and the reckoning in words."""

    name: str
    bytes: int
    tag: str
    how: str


def memory(blueprint: Blueprint, longest: Lengths) -> list[Part]:
    """Per-device memory, part by part."""
    experiment, config = blueprint.experiment, blueprint.config
    placed = blueprint.layout.device_bytes()
    parts = [
        Part("frozen weights", placed.get("frozen", 0), "exact", "every array of the layout"),
        Part("trainable weights", placed.get("trainable", 0), "exact", "float32"),
        Part("reference copy", placed.get("reference", 0), "exact", "none where an adapter shares its base"),
        Part("optimizer", placed.get("optimizer", 0), "exact", "every array of its state"),
        Part("gradients", 2 * placed.get("trainable", 0), "estimated", "float32: one of this part, one added up"),
    ]
    shards = blueprint.layout.batch_shards(experiment.rows_at_once)
    rows = experiment.rows_at_once / shards
    activations, how = _activations(config, rows, longest.trunk, blueprint.compute.itemsize, experiment.memory.remat)
    parts.append(Part("activations", activations, "estimated", how))
    chunk = math.ceil(min(experiment.memory.logprob_tokens / shards, rows * max(longest.head, 1)))
    logits = 3 * 4 * chunk * -(-config.vocab_size // experiment.mesh.tensor)
    parts.append(
        Part(
            "log-probabilities",
            logits,
            "estimated",
            f"{chunk} tokens x {config.vocab_size} logits, float32, three copies",
        )
    )
    return [part for part in parts if part.bytes]


def _activations(config: DecoderConfig, rows: float, length: int, size: int, remat: str) -> tuple[int, str]:
    """Bytes kept for the backward pass: of a layer, for all of them or for one period and the layers' inputs."""
    tokens = rows * length
    # Autodiff keeps what norms and gelu compute on their way, too; checked against XLA's figures in the tests.
    width = 20 * config.embed_dim + 8 * config.num_heads * config.head_dim + 8 * config.mlp_dim
    layer = tokens * width * size + 2 * rows * config.num_heads * length**2 * 4
    if remat == "full":
        inputs = tokens * config.embed_dim * size * (config.num_layers // config.window_pattern + 1)
        return int(inputs + layer * config.window_pattern), "inputs of each period, and one period in full"
    return int(layer * config.num_layers), "what each layer keeps for the backward pass"


def plan(experiment: Experiment, platform: str = "cpu") -> dict[str, Any]:
    """The plan as plain JSON values.

    Raises:
        PlanError: with everything that does not fit.
    """
    blueprint = draw(experiment, platform)
    longest = lengths(experiment.data)
    parts = memory(blueprint, longest)
    return {
        "id": experiment.id,
        "steps": experiment.steps,
        "rows": experiment.steps * experiment.batch_size,
        "tokens_at_most": experiment.steps * experiment.batch_size * longest.trunk,
        "microbatches": experiment.microbatches,
        "parameters": blueprint.parameters,
        "compute": blueprint.compute.name,
        "reference": _reference(blueprint),
        "mesh": experiment.mesh.sizes,
        "devices": experiment.mesh.device_count,
        "memory": [attrs.asdict(part) for part in parts],
        "bytes_per_device": sum(part.bytes for part in parts),
        "arrays": [
            {
                "path": placed.path,
                "part": placed.part,
                "axes": list(placed.axes),
                "dtype": placed.dtype,
                "shape": list(placed.shape),
                "spec": [list(axis) if isinstance(axis, tuple) else axis for axis in placed.resolved.spec],
                "device_shape": list(placed.device_shape),
                "device_bytes": placed.device_bytes,
                "why": [attrs.asdict(tried) for tried in placed.resolved.trace],
            }
            for placed in blueprint.layout
        ],
    }


def _reference(blueprint: Blueprint) -> str:
    if blueprint.reference is None:
        return "none: the objective compares with nothing"
    if blueprint.copied:
        return "a frozen copy of the first weights"
    kept = blueprint.experiment.quantization
    base = "the frozen base" if kept is None else f"the frozen base in {type(kept).__name__}"
    return f"{base} with the adapter off: no copy"
