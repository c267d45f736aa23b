"""Run by test_placements.py with eight CPU devices: where the arrays of programs lie, and what the programs compute."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import attrs
import jax
from jax.sharding import NamedSharding
from small_lab import samples
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
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
from nnxdsl.sharding.layout import bits
from nnxdsl.terminal.plan_format import format_shape

QLORA = {"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.NF4(block_size=8)}
ODD = {"model": Small(layers=3, pattern=2, heads=4, mlp_dim=30)}
BOTH = ("optimizer", "reference")
PLACEMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {
        "one": {"mesh": Mesh()},
        "data2-fsdp2-tensor2": {"mesh": Mesh(data=2, fsdp=2, tensor=2)},
        "data2-fsdp2-context2": {"mesh": Mesh(data=2, fsdp=2, context=2)},
        "fsdp4-stage2": {"mesh": Mesh(fsdp=4, stage=2)},
        "offload": {"mesh": Mesh(data=2, fsdp=2, tensor=2), "memory": Memory(offload=BOTH)},
    },
    "qlora": {
        "one": {"mesh": Mesh()},
        "data2-fsdp2-tensor2": {"mesh": Mesh(data=2, fsdp=2, tensor=2)},
    },
    "frozen qlora": {
        "one": {"mesh": Mesh()},
        "offload": {"mesh": Mesh(data=2, fsdp=2, tensor=2), "memory": Memory(offload=("frozen",))},
    },
    "frozen lora": {
        "one": {"mesh": Mesh()},
        "offload": {"mesh": Mesh(data=2, fsdp=2, tensor=2), "memory": Memory(offload=("frozen",))},
    },
    "odd": {
        "one": {"mesh": Mesh()},
        "replicate": {"mesh": Mesh(fsdp=2, tensor=4, indivisible="replicate")},
    },
    "slow full": {
        "one": {"mesh": Mesh()},
        "fsdp4-tensor2": {"mesh": Mesh(fsdp=4, tensor=2)},
        "slices": {"mesh": Mesh(data=2, fsdp=2, tensor=2, slices=2)},
        "slices of fsdp": {"mesh": Mesh(fsdp=4, tensor=2, slices=2)},
        "without zero": {"mesh": Mesh(data=4, tensor=2, zero1=False)},
        "expert": {"mesh": Mesh(data=2, expert=2, tensor=2)},
        "rules": {
            "mesh": Mesh(data=2, fsdp=2, tensor=2, array_rules=(("*.mlp.*", (("mlp", None), ("embed", "tensor"))),))
        },
        "offload, recomputed": {"mesh": Mesh(data=2, fsdp=2, tensor=2), "memory": Memory(offload=BOTH, remat="full")},
        "offload, one": {"mesh": Mesh(), "memory": Memory(offload=BOTH)},
    },
    "slow qlora": {
        "one": {"mesh": Mesh()},
        "fsdp4-tensor2": {"mesh": Mesh(fsdp=4, tensor=2)},
        "data2-fsdp2-context2": {"mesh": Mesh(data=2, fsdp=2, context=2)},
        "fsdp4-stage2": {"mesh": Mesh(fsdp=4, stage=2)},
        "slices": {"mesh": Mesh(data=2, fsdp=2, tensor=2, slices=2)},
    },
    "slow frozen qlora": {
        "one": {"mesh": Mesh()},
        "offload, one": {"mesh": Mesh(), "memory": Memory(offload=("frozen", "optimizer"))},
        "offload, recomputed": {
            "mesh": Mesh(data=2, fsdp=2, stage=2),
            "memory": Memory(offload=("frozen", "optimizer"), remat="full"),
        },
    },
}
FIELDS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": QLORA["adapter"]}, "qlora": QLORA, "odd": ODD}


def groups(program: Program, state: TrainState) -> dict[str, dict[str, jax.Array]]:
    result = {
        "frozen": state.frozen,
        "trainable": state.trainable,
        "reference": state.reference,
        "optimizer": checkpoint_arrays(program, state)["optimizer"],
    }
    return {part: leaves for part, leaves in result.items() if leaves}


def dumped(program: Program, state: TrainState) -> str:
    """What `layout.dump()` would say, read off the arrays themselves."""
    lines = []
    for part, leaves in groups(program, state).items():
        for path, leaf in leaves.items():
            sharding = leaf.sharding
            assert isinstance(sharding, NamedSharding), (path, sharding)
            where = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
            (piece,) = {shard.data.shape for shard in leaf.addressable_shards}
            size = math.prod(piece) * bits(leaf.dtype.name) // 8
            host = " host" if sharding.memory_kind == "pinned_host" else ""
            lines.append(f"{part} {path} {format_shape(leaf.shape)} {leaf.dtype.name} {where} {size}{host}\n")
    return "".join(lines)


def misplaced(program: Program, state: TrainState) -> list[str]:
    """Arrays that do not lie on the devices, and in the memory, that the layout names, piece by piece."""
    wrong = []
    default = jax.devices()[0].default_memory().kind
    for part, leaves in groups(program, state).items():
        for path, leaf in leaves.items():
            placed = program.layout.arrays[part][path]
            kind = "pinned_host" if placed.memory == "host" else default
            wanted = NamedSharding(program.mesh, placed.spec, memory_kind=kind)
            kinds = {shard.data.sharding.memory_kind for shard in leaf.addressable_shards}
            owners = {shard.device: shard.index for shard in leaf.addressable_shards}
            if (
                not leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
                or kinds != {kind}
                or owners != wanted.addressable_devices_indices_map(leaf.shape)
            ):
                wrong.append(f"{part} {path}: {leaf.sharding} {kinds}, expected {wanted}")
    return wrong


def main(chosen: list[str]) -> None:
    """One entry for each run and placement."""
    batches = [samples.pairs(8, seed=seed) for seed in range(2)]
    report: dict[str, dict[str, Any]] = {}
    for name in chosen:
        for where, placement in PLACEMENTS[name].items():
            fields = {"model": Small(layers=2, pattern=1, heads=4), **FIELDS[name.split()[-1]], **placement}
            fields["memory"] = attrs.evolve(fields.get("memory", Memory()), reference="online")
            experiment = Experiment(
                name="placements",
                objective=Objective.DPO(beta=0.5),
                data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
                optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3), weight_decay=0.1, eps=1e-4),
                batch_size=8,
                microbatch_size=4,
                steps=10,
                **fields,
            )
            program = compile(experiment)
            state = samples.trained(program)
            entry: dict[str, Any] = {
                "devices": len(program.mesh.devices.flat),
                "dump": program.layout.dump(),
                "after init": dumped(program, state),
                "misplaced": misplaced(program, state),
                "metrics": [],
            }
            for batch in batches:
                state, result = program.step(state, batch)
                entry["metrics"].append({key: float(value) for key, value in result.items()})
            entry["after steps"] = dumped(program, state)
            entry["misplaced"] += misplaced(program, state)
            report[f"{name}: {where}"] = entry
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
