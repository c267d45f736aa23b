"""The language stays light: importing it loads neither jax nor numpy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "qwix",
    "numpy",
    "torch",
    "tokenizers",
    "jinja2",
    "rich",
    "gradio",
)
SPEC = Path(__file__).parents[2] / "nnxdsl" / "config"


@pytest.mark.parametrize("statement", ["import nnxdsl", "from nnxdsl import *", "import nnxdsl.config.core.docstrings"])
def test_nothing_heavy_is_loaded(statement: str) -> None:
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "nnxdsl" in loaded
    assert not set(HEAVY) & set(loaded)


def test_the_language_builds_a_sweep_without_anything_heavy() -> None:
    code = (
        "import sys\n"
        "from nnxdsl import *\n"
        "from nnxdsl.config.core.codegen import parse_value\n"
        "data, schedule = Data.Preferences('a'), parse_value('Schedule.Constant(lr=1e-4)')\n"
        "one = Experiment(name='a', model=Model.Gemma3('tiny'), data=data, objective=Objective.DPO(), steps=1,\n"
        "                 batch_size=2, optimizer=Optimizer.SGD(schedule=schedule))\n"
        "sweep = Sweep(one, product({'seed': range(20)}))\n"
        "assert len({from_json(to_json(each)).id for each in sweep}) == 20 and to_python(one)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_no_file_of_the_language_names_another_floor() -> None:
    for path in SPEC.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):  # what is imported for type checkers alone is not loaded
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                allowed = module.startswith(("nnxdsl.config", "nnxdsl.errors"))
                assert allowed or not module.startswith("nnxdsl."), f"{path.name}: {module}"
                assert module.partition(".")[0] not in HEAVY, f"{path.name}: {module}"
