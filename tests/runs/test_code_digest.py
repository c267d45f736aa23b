"""The code digest: a change of any file gives a new key for cached results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl.runs.code_digest import code_digest, code_versions

PACKAGE = Path(__file__).parents[2] / "nnxdsl"

COMPUTING = """
import json, sys
from nnxdsl import *
from nnxdsl.cli.dispatch import main_of
from nnxdsl.planning import aot
rows = "".join('{"prompt": "a", "chosen": "b", "rejected": "c"}\\n' for _ in range(4))
open("pairs.jsonl", "w").write(rows)
experiment = Experiment(
    name="small", model=Model.Gemma3("tiny"), objective=Objective.DPO(beta=0.1),
    data=Data.Preferences("pairs.jsonl", max_prompt_length=8, max_completion_length=8),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)), memory=Memory(reference="cached"),
    batch_size=2, steps=1,
)
aot.compile_ahead(experiment, "cpu", 1)
assert main_of(experiment, ["run", "--quiet"]) == 0
print(json.dumps(sorted(str(m.__file__) for n, m in sys.modules.items() if n.split(".")[0] == "nnxdsl")))
"""
"""Both that keep results under the digest: a plan that is compiled, and a run that caches its reference."""


@pytest.mark.slow
def test_a_change_of_any_file_that_a_computing_process_imports_is_seen(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPUTING],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = [Path(name).relative_to(PACKAGE) for name in json.loads(done.stdout.splitlines()[-1])]
    assert {"models/families/gemma3.py", "program/step.py", "config/experiment.py"} <= {p.as_posix() for p in imported}
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    digest = code_digest.__wrapped__
    before = digest(copy)
    assert before == code_digest()
    for name in imported:
        source = (copy / name).read_bytes()
        (copy / name).write_bytes(source + b"\n")
        assert digest(copy) != before, name
        (copy / name).write_bytes(source)
    assert digest(copy) == before


def test_a_file_that_is_moved_added_or_joined_to_another_is_seen(tmp_path: Path) -> None:
    digest = code_digest.__wrapped__
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    seen = {digest(tmp_path)}
    (tmp_path / "a.py").rename(tmp_path / "inner" / "a.py")
    seen.add(digest(tmp_path))
    (tmp_path / "b.py").write_text("")
    seen.add(digest(tmp_path))
    (tmp_path / "inner" / "a.py").write_text("")
    (tmp_path / "b.py").write_text("x = 1\n")
    seen.add(digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "_app").mkdir()
    (tmp_path / "_app" / "page.py").write_text("x = 1\n")
    assert digest(tmp_path) in seen


def test_the_packages_that_compute_are_named() -> None:
    assert {"nnxdsl", "jax", "jaxlib", "flax", "optax", "qwix", "numpy"} <= code_versions().keys()
