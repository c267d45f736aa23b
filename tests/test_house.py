"""The house itself: which floor may know which, and which file may use which library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nnxdsl"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    "spec": {"spec"},
    "models": {"models", "spec"},
    "data": {"data", "spec"},
    "program": {"program", "models", "data", "spec"},
    "run": {"run", "program", "models", "data", "spec"},
}
"""What a file of each floor may import from the package."""

JAX = ("jax", "flax", "optax", "orbax", "qwix", "jaxtyping")
WITHOUT_JAX = (
    "spec/",
    "data/",
    "models/config.py",
    "models/decoder_config.py",
    "models/families/",
    "models/experts_config.py",
    "models/latent_config.py",
    "models/delta_config.py",
    "models/hub_download.py",
    "run/store.py",
    "run/lock.py",
    "run/process.py",
    "run/jsonl.py",
    "run/manifest.py",
    "run/display.py",
    "run/plan_view.py",
    "run/drawing.py",
    "run/tables.py",
    "run/ahead_process.py",
    "run/xla_flags.py",
    "run/allocator.py",
    "program/hardware.py",
    "program/collectives.py",
    "run/stop.py",
    "run/turn.py",
    "run/launch/",
    "run/launch_command.py",
    "run/sweep",
    "cli.py",
    "cli_launch.py",
    "__main__.py",
    "__init__.py",
)
ONLY_IN = {
    "qwix": {"program/adapters.py", "program/rounding.py"},
    "orbax": {"run/checkpoint.py", "run/orbax_tree.py"},
    "huggingface_hub": {"models/hub_download.py"},
    "cattrs": {"spec/tree.py"},
    "tokenizers": {"data/hub_tokenizers.py"},
    "jinja2": {"data/chat.py"},
    "submitit": {"run/launch/slurm_engine.py"},
    "ray": {"run/launch/ray_engine.py"},
    "optuna": {"run/sweep_search.py"},
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports when it is loaded or run, but not those for type checkers alone."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows_go_one_way(path: Path) -> None:
    floor = path.relative_to(PACKAGE).parts[0]
    if floor not in FLOORS:
        return
    floors = {module.split(".")[1] for module in imports(path) if module.startswith("nnxdsl.")}
    assert floors <= FLOORS[floor], f"{floor} must not know {sorted(floors - FLOORS[floor])}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_jax_stays_on_its_floors(path: Path) -> None:
    if not name(path).startswith(WITHOUT_JAX):
        return
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & set(JAX)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_known_to_one_file(library: str) -> None:
    users = {name(path) for path in FILES if any(m.split(".")[0] == library for m in imports(path))}
    assert users <= ONLY_IN[library]


def test_losses_know_no_model() -> None:
    known = imports(PACKAGE / "program/losses.py")
    assert not any(module.startswith(("nnxdsl.models", "nnxdsl.program.adapters", "flax")) for module in known)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_says_what_it_knows_and_is_not_too_long(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "begin with one sentence that says what the file knows"
    assert len(text.splitlines()) <= 600


def test_ci_runs_the_readmes_command() -> None:
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest"
    assert command in (ROOT / ".ci/run").read_text()
    assert command in (ROOT / "README.md").read_text()
