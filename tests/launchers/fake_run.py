"""A run without training: what `nnxdsl run` writes into its directory, step by step. `fake_run.py FILE HOME`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import from_json, get
from nnxdsl.config.experiment import Experiment
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory

STEP_SECONDS = 0.1


def main(file: str, home: str, *_: Any) -> int:
    one = from_json(Path(file).read_text(encoding="utf-8"), Experiment)
    rate = float(str(get(one, "optimizer.schedule.lr")))
    tree = json.loads(Path(file).read_text(encoding="utf-8"))
    run = RunDirectory.create(
        Path(home) / one.id, identity=canonical(one), experiment_json=tree, experiment_py=to_python(one)
    )
    with RunLock(run.path):
        if run.status().get("state") == "finished":
            return 0
        run.clear_requests()
        start = run.status().get("step") or 0
        run.append_attempt({"start": start})
        run.take_over(state="running", total=one.steps)
        for step in range(start, one.steps):
            if run.stop_requested():
                run.write_status(state="stopped", step=step, exit_code=0)
                return 0
            time.sleep(STEP_SECONDS)
            if rate > 1:
                run.write_status(state="failed", step=step, error="RunError: loss is nan", exit_code=1)
                return 1
            run.append_metrics({"step": step, "loss": 1.0 / (step + 1)})
            run.append_evaluation({"step": step + 1, "eval/loss": abs(math.log10(rate) + 2) + 1.0 / (step + 1)})
            run.write_status(step=step + 1)
        run.write_status(state="finished", step=one.steps, exit_code=0)
        run.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
