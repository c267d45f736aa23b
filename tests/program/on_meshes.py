"""Run by test_meshes.py in a process with eight CPU devices: the same steps on one device and on meshes, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from small_lab import samples
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Guard,
    Memory,
    Mesh,
    Objective,
    Optimizer,
    Quantization,
    Schedule,
    compile,
)
from nnxdsl.program.checkpoint_views import checkpoint_arrays
from nnxdsl.program.compile import Program, TrainState

MESHES = {"one": Mesh(), "fsdp4-tensor2": Mesh(fsdp=4, tensor=2), "data2-fsdp2-tensor2": Mesh(data=2, fsdp=2, tensor=2)}
RATE, ONLINE = Schedule.Constant(lr=1e-3), Memory(reference="online")
ADAMW = Optimizer.AdamW(schedule=RATE, weight_decay=0.1, eps=1e-4)
MUON = Optimizer.Muon(schedule=RATE, weight_decay=0.1, eps=1e-4)
ADAFACTOR = Optimizer.Adafactor(schedule=RATE, min_factored=16, weight_decay=0.1)
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qlora": ({"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.NF4(block_size=8)}, tuple(MESHES)),
    "full": ({"memory": Memory(attention="chunked", reference="online")}, tuple(MESHES)[:2]),
}
DORA = Adapter.DoRA(rank=2, alpha=3.0, scaling="sqrt_rank", dropout=0.25, ranks=(("mlp.down", 4),))
SLOW: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dora": (
        {"adapter": DORA, "quantization": Quantization.Int8(block_size=8), "memory": Memory(reference="online")},
        tuple(MESHES),
    ),
    "lora": ({"adapter": Adapter.LoRA(rank=2, dropout=0.25), "memory": Memory(remat="full")}, tuple(MESHES)[::2]),
    "muon": ({"optimizer": MUON, "guard": Guard.SkipSpikes(window=2), "memory": ONLINE}, tuple(MESHES)[::2]),
    "adafactor": ({"optimizer": ADAFACTOR, "frozen": ("embed", "*norm"), "memory": ONLINE}, tuple(MESHES)[::2]),
}


def same(result: Any, expected: Any) -> bool:
    """Whether arrays are equal to the bit; magnitudes, which are sums over cut axes, but for their rounding."""

    def equal(keys: Any, ours: np.ndarray, theirs: np.ndarray) -> bool:
        rounded = str(keys[-1]).endswith("_lora_m']")
        return np.allclose(ours, theirs, rtol=5e-7, atol=0) if rounded else np.array_equal(ours, theirs)

    return jax.tree.all(jax.tree_util.tree_map_with_path(equal, result, expected))


def misplaced(program: Program, state: TrainState) -> list[str]:
    """Arrays whose sharding, shape or dtype is not that of the layout."""
    groups = {
        "trainable": state.trainable,
        "frozen": state.frozen,
        "reference": state.reference,
        "optimizer": checkpoint_arrays(program, state)["optimizer"],
    }
    assert {part: set(leaves) for part, leaves in groups.items() if leaves} == {
        part: set(leaves) for part, leaves in program.layout.arrays.items()
    }
    wrong = []
    for part, leaves in groups.items():
        for path, leaf in leaves.items():
            placed = program.layout.arrays[part][path]
            wanted = NamedSharding(program.mesh, placed.resolved.spec)
            pieces = {shard.data.shape for shard in leaf.addressable_shards}
            if (
                not leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
                or pieces != {placed.device_shape}
                or (leaf.shape, leaf.dtype.name) != (placed.shape, placed.dtype)
                or leaf.sharding.device_set != set(program.mesh.devices.flat)
            ):
                wrong.append(f"{part} {path}: {leaf.sharding} {pieces} {leaf.dtype}, expected {wanted} {placed}")
    return wrong


def difference(result: TrainState, expected: TrainState) -> float:
    """Largest difference of a trained parameter."""
    values = zip(jax.device_get(list(result.trainable.values())), expected.trainable.values(), strict=True)
    return max(float(np.abs(ours - np.asarray(theirs)).max()) for ours, theirs in values)


def main() -> None:
    """One entry for each run and mesh; of the slow ones that are named, else of the others."""
    runs = {name: SLOW[name] for name in sys.argv[1:]} or RUNS
    batches = [samples.pairs(8, seed=seed) for seed in range(2)]
    report: dict[str, dict[str, Any]] = {}
    for name, (fields, meshes) in runs.items():
        alone: dict[str, Any] = {}
        for where in meshes:
            experiment = Experiment(
                name="meshes",
                model=Small(layers=2, pattern=1, heads=4),
                objective=Objective.DPO(beta=0.5),
                data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
                batch_size=8,
                microbatch_size=4 if where != "data2-fsdp2-tensor2" else 8,
                steps=10,
                mesh=MESHES[where],
                **{"optimizer": ADAMW, **fields},
            )
            program = compile(experiment)
            state = program.init()
            rendered = jax.device_get((state.trainable, state.frozen, state.reference))
            wrong = misplaced(program, state)
            state = samples.trained(program)
            evaluated = {key: float(r.total / r.count) for key, r in program.evaluate(state, batches[0]).items()}
            metrics = []
            for batch in batches:
                state, result = program.step(state, batch)
                metrics.append({key: float(value) for key, value in result.items()})
            wrong += misplaced(program, state)
            alone = alone or {"drawn": rendered, "state": state}
            report[f"{name} {where}"] = {
                "devices": len(program.mesh.devices.flat),
                "misplaced": wrong,
                "same draw": same(rendered, alone["drawn"]),
                "metrics": metrics,
                "evaluated": evaluated,
                "difference": difference(state, alone["state"]),
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
