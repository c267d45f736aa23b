"""Makes directories of runs as training leaves them: `python -m tests.app.many HOME RUNS [STEPS]`."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.runs.run_dir import FORMAT
from nnxdsl.storage import process_info

STATES = ("finished", "finished", "finished", "stopped", "failed")


def experiment(number: int, **changes: object) -> Experiment:
    fields = {
        "name": f"dpo-{number:04d}",
        "model": Model.Gemma3("tiny"),
        "adapter": Adapter.LoRA(rank=2),
        "objective": Objective.DPO(beta=0.1),
        "data": Data.Preferences("pairs.jsonl"),
        "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
        "batch_size": 4,
        "steps": 100,
        "seed": number,
        **changes,
    }
    return Experiment(**fields)  # type: ignore[arg-type]


def rows(steps: int, seed: int = 0) -> list[dict[str, object]]:
    noise = random.Random(seed)
    return [
        {
            "step": step,
            "attempt": 1,
            "loss": 0.69 * math.exp(-step / steps) + 0.02 * noise.random(),
            "rewards/accuracies": min(1.0, 0.5 + step / steps / 2),
            "rewards/margins": step / steps,
            "rewards/chosen": 0.2 * step / steps,
            "rewards/rejected": -0.8 * step / steps,
            "grad_norm": 1.0 + noise.random(),
            "learning_rate": 1e-4,
            "num_tokens": 400 * (step + 1),
            "tokens/s": 5000 + 500 * noise.random(),
            "pairs/s": 40 + noise.random(),
        }
        for step in range(steps)
    ]


def write_run(home: Path, made: Experiment, state: str, steps: int, **status: object) -> Path:
    """A run's directory, without the store's syncs: a thousand of them take seconds."""
    path = home / made.id
    for name in ("checkpoints", "control"):
        (path / name).mkdir(parents=True)
    (path / "experiment.json").write_text(json.dumps(to_dict(made)))
    (path / "experiment.py").write_text(to_python(made))
    record = {"format": FORMAT, "identity": canonical(made), "created": process_info.utc()}
    (path / "run.json").write_text(json.dumps(record))
    said = {"state": state, "step": steps, "total": made.steps, "heartbeat": process_info.clock(), **status}
    (path / "status.json").write_text(json.dumps(said))
    written = rows(steps, made.seed)
    if written and state == "finished":  # a run that has finished has figures of its last step
        written[-1]["step"] = made.steps - 1
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def write_many(home: Path, count: int, steps: int = 50) -> None:
    for number in range(count):
        state = STATES[number % len(STATES)]
        write_run(home, experiment(number), state, steps, error="RunError: loss is nan" if state == "failed" else None)


if __name__ == "__main__":
    write_many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 50)
