"""Run by test_outer.py in a process with eight CPU devices: workers on one device and on meshes, and what they send."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from on_meshes import difference, misplaced
from small_lab import samples
from small_lab.model import Small

from nnxdsl import Adapter, Data, Experiment, Mesh, Objective, Optimizer, Outer, Schedule, compile

MESHES = {
    "one": Mesh(),
    "data2-fsdp2-tensor2": Mesh(data=2, fsdp=2, tensor=2),
    "data2-fsdp4": Mesh(data=2, fsdp=4),
    "data4": Mesh(data=4),  # of which two workers are no multiple
}
ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3), weight_decay=0.1, eps=1e-4, max_grad_norm=0.5)
TEXT = {"objective": Objective.SFT(loss_on="all"), "data": Data.Text("none.jsonl", max_length=32)}
PAIRS = {
    "objective": Objective.DPO(beta=0.5),
    "data": Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
    "adapter": Adapter.LoRA(rank=2, dropout=0.25),
}
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({**TEXT, "microbatch_size": 8}, tuple(MESHES)),
    "lora": (PAIRS, tuple(MESHES)[:3]),
}

COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
ARRAY = re.compile(r"\b(f32|s32|u32|bf16|pred)\[([\d,]*)\]")
GROUPS = r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
AXES = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def groups(line: str) -> list[list[int]]:
    """The devices that take part in each collective of a line, in every spelling."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return [numbers(group) for group in re.findall(r"\{([^}]*)\}", match[1])]
    if match := re.search(GROUPS, line):
        devices = np.arange(8).reshape(numbers(match[3]))
        devices = devices.transpose(numbers(match[4])) if match[4] else devices
        return devices.reshape(int(match[1]), int(match[2])).tolist()
    match = re.search(AXES, line)
    assert match is not None, line
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
    devices = np.arange(math.prod(sizes.values()))
    if match[2]:
        devices = devices.reshape(numbers(match[2])).transpose(numbers(match[3]) if match[3] else None)
    devices = devices.reshape(tuple(sizes.values()))
    assert ":" not in match[4], line
    named = [list(sizes).index(axis) for axis in re.findall(r"'([^']*)'", match[4])]
    devices = np.moveaxis(devices, named, range(-len(named), 0))
    return devices.reshape(-1, math.prod(devices.shape[-len(named) :])).tolist()


def across(text: str, data: int, devices: int) -> Iterator[tuple[int, bool]]:
    """Bytes of each collective between devices that differ in `data`, and whether it is in a branch of the step."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.$-]+) \(.*\{\s*$", line):
            name = head[2]
            entry = name if head[1] else entry
        bodies.setdefault(name, []).append(line)

    def below(starts: list[str]) -> set[str]:
        actual: set[str] = set()
        while starts:
            actual.add(one := starts.pop())
            called = [other for line in bodies.get(one, ()) for other in callees(line)]
            starts += [other for other in called if other not in actual]
        return actual

    def callees(line: str) -> list[str]:
        branches = re.search(r"branch_computations=\{([^}]*)\}", line)
        return CALLED.findall(line) + (re.findall(r"[\w.$-]+", branches[1].replace("%", "")) if branches else [])

    branched = below([other for line in bodies[entry] if " conditional(" in line for other in callees(line)])
    for name, lines in bodies.items():
        for line in lines:
            result = COLLECTIVE.search(line)
            if result and any(len({device // (devices // data) for device in group}) > 1 for group in groups(line)):
                yield sum(4 * math.prod(numbers(shape)) for _, shape in ARRAY.findall(result[1])), name in branched


def main() -> None:
    """One entry for each run and mesh: metrics, arrays that are misplaced, and what goes over `data`."""
    report: dict[str, dict[str, Any]] = {}
    for name, (fields, meshes) in RUNS.items():
        draw = samples.pairs if "adapter" in fields else samples.sequences
        batches = [draw(16, seed=seed) for seed in range(3)]
        alone: Any = None
        for where in meshes:
            experiment = Experiment(
                name="workers",
                model=Small(layers=2, pattern=1, heads=4),
                optimizer=ADAMW,
                outer=Outer.DiLoCo(workers=2, every_steps=2),
                batch_size=16,
                steps=10,
                mesh=MESHES[where],
                **fields,
            )
            program = compile(experiment)
            state = samples.trained(program)
            text = program.lower(program.shard_batch(batches[0])).compile().as_text()
            assert text is not None
            sent = list(across(text, experiment.mesh.data, program.mesh.size))
            metrics = []
            for batch in batches:
                state, result = program.step(state, batch)
                metrics.append({key: float(value) for key, value in result.items()})
            alone = alone or state
            report[f"{name} {where}"] = {
                "misplaced": misplaced(program, state),
                "metrics": metrics,
                "difference": difference(state, alone),
                "always": sum(size for size, is_branched in sent if not is_branched),
                "together": sum(size for size, is_branched in sent if is_branched),
                "weights": program.layout.device_bytes()["trainable"],
                "optimizer": program.layout.device_bytes()["optimizer"],
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
