"""Type checking of experiments: valid ones pass, invalid ones are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PYRIGHT = Path(sys.executable).with_name("pyright")

RIGHT = """
from nnxdsl import (Adapter, Checkpoint, Data, Evaluation, Experiment, Mesh, Model,
                    Objective, Optimizer, Quantization, Schedule, Sweep, Weights, cross, evolve, product, zipped)

experiment = Experiment(
    name="dpo-gemma3-1b",
    model=Model.Gemma3("1b", weights=Weights.HF("google/gemma-3-1b-it")),
    adapter=Adapter.LoRA(rank=16, alpha=32.0, targets=("attention", "mlp")),
    quantization=Quantization.NF4(block_size=64),
    objective=Objective.DPO(beta=0.1),
    data=Data.Preferences("data/ultrafeedback.jsonl", max_prompt_length=512, max_completion_length=512),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-6, warmup_ratio=0.1), max_grad_norm=1.0),
    batch_size=64, steps=2_000, seed=0,
    mesh=Mesh(fsdp=4, tensor=2), microbatch_size=8,
    evaluation=Evaluation(every_steps=200, prompts=("Explain DPO to a child.",)),
    checkpoint=Checkpoint(every_steps=500, keep=2),
)
longer: Experiment = evolve(experiment, {"steps": 4_000})
staged = Weights.From(experiment)
sweep = Sweep(experiment, cross(
    product({"objective": [Objective.DPO(beta=0.05), Objective.DPO(beta=0.1)]}),
    zipped({"adapter.rank": [8, 64], "adapter.alpha": [16.0, 128.0]})))

if __name__ == "__main__":
    experiment.main()
"""

WRONG = """
from nnxdsl import Adapter, Data, Mesh, Model, Objective, Optimizer, Schedule

Objective.DPO(bta=1)
Objective.DPO(0.1)
Objective.DPO(beta="0.1")
Objective.SFT(loss_on="asistant")
Model.Gemma3("2b")
Mesh(tensor="2")
Adapter.LoRA(targets=["mlp"])
Optimizer.AdamW(schedule=Objective.DPO())
Schedule.WarmupCosine()
Data.Text("a").field = "b"
Objective.DPPO()
Mesh().fsd
"""


def marked(path: Path, text: str) -> set[int]:
    """The lines (the first is 0) on which pyright, in strict mode, finds an error."""
    path.write_text("# pyright: strict" + text)
    done = subprocess.run(
        [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] for each in result if each["severity"] == "error"}


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed")
def test_pyright_accepts_the_right_and_marks_the_wrong(tmp_path: Path) -> None:
    assert marked(tmp_path / "right.py", RIGHT) == set()
    assert marked(tmp_path / "wrong.py", WRONG) == set(range(3, len(WRONG.splitlines())))


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed")
def test_the_language_itself_is_strictly_typed() -> None:
    root = Path(__file__).parents[2]
    command = [str(PYRIGHT), "--pythonpath", sys.executable, "nnxdsl/config"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
