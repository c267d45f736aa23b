"""Run by test_attention_kernel.py in a process with eight CPU devices: steps with dense and ring attention, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from small_lab import samples
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Objective, Optimizer, Schedule, allow_imports, compile
from nnxdsl.planning.plan import plan

RING = "small_lab.ring_attention:RingAttention"
CASES: dict[str, dict[str, Any]] = {
    "dense": {"mesh": Mesh(context=4), "memory": Memory(attention="dense", reference="online")},
    "ring": {"mesh": Mesh(context=4), "memory": Memory(attention=RING, reference="online")},
}


def main() -> None:
    """Metrics of two steps, and the kernel of the plan."""
    allow_imports(RING)
    report: dict[str, Any] = {}
    for name, fields in CASES.items():
        experiment = Experiment(
            name="ring",
            model=Small(layers=2, heads=4),
            objective=Objective.DPO(beta=0.5),
            data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            batch_size=4,
            steps=10,
            **fields,
        )
        program = compile(experiment)
        state, metrics = samples.trained(program), []
        for seed in range(2):
            state, result = program.step(state, samples.pairs(4, seed=seed))
            metrics.append({key: float(value) for key, value in result.items()})
        report[name] = {"attention": plan(experiment)["attention"], "metrics": metrics}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
