"""Run by test_kto.py: steps of KTO on batches of which parts lack a label, as JSON, {layout: {labels: metrics}}.

python tests/losses/on_labels.py            # eight CPU devices
python tests/losses/on_labels.py RANK PORT  # one of two processes, each with a device
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from small_lab import samples
from small_lab.model import Small

from nnxdsl import Adapter, Data, Experiment, Memory, Mesh, Objective, Optimizer, Schedule, compile

LABELS = {
    "halves": (1, 1, 1, 1, 0, 0, 0, 0),  # a device or a process has one of both
    "alternating": (1, 0, 1, 0, 1, 0, 1, 0),  # and so has a micro-batch
    "one": (1, 1, 1, 1, 1, 1, 1, 0),
    "none": (1, 1, 1, 1, 1, 1, 1, 1),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "accumulated": {"microbatch_size": 4},
    "devices": {"mesh": Mesh(data=2)},
    "accumulated devices": {"mesh": Mesh(data=2), "microbatch_size": 4},
}
PROCESSES = ("devices",)


def main() -> None:
    """Metrics of a second step, for each layout and labels."""
    if sys.argv[1:]:
        rank, port = sys.argv[1:]
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    batch = samples.pairs(8)
    report: dict[str, dict[str, Any]] = {}
    for layout in PROCESSES if sys.argv[1:] else LAYOUTS:
        experiment = Experiment(
            name="labels",
            model=Small(layers=1, pattern=1),
            adapter=Adapter.LoRA(rank=2),
            objective=Objective.KTO(beta=0.5),
            data=Data.Feedback("none.jsonl", max_prompt_length=16, max_completion_length=16),
            memory=Memory(reference="online"),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            batch_size=8,
            steps=10,
            **LAYOUTS[layout],
        )
        program = compile(experiment)
        report[layout] = {}
        for name, labels in LABELS.items():
            state, labelled = samples.trained(program), batch._replace(desirable=np.array(labels, np.float32))
            state, _ = program.step(state, labelled)  # after which the policy is not the reference
            _, result = program.step(state, labelled)
            report[layout][name] = {key: float(value) for key, value in result.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
