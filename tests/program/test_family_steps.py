"""Five steps of a checkpoint equal those of transformers in torch; benchmarks/family_steps.py has all families."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "family_steps.py"


@pytest.mark.parametrize("name", ["llama3", "phi3_longrope", "qwen3_moe"])
def test_steps_equal_those_of_torch(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.23")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--peers", sys.executable, name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {name} |" in done.stdout
