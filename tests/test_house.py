"""The rooms of the library: their ranks, which room may know which, and which file may use which library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nnxdsl"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}

RANKS = {
    "errors": 0,
    **dict.fromkeys(("config", "storage", "terminal"), 1),
    **dict.fromkeys(("data", "models", "runtime"), 2),
    **dict.fromkeys(("formats", "sharding", "optim", "runs"), 3),
    **dict.fromkeys(("adapters", "losses", "launch"), 4),
    "program": 5,
    **dict.fromkeys(("planning", "weights", "sweep"), 6),
    "generate": 7,
    "trainer": 8,
    "cli": 9,
}
"""A room may import rooms of lower rank."""

MOST_FILES = 20
JAX = ("jax", "flax", "optax", "orbax", "qwix", "jaxtyping")
WITHOUT_JAX = (
    "config/",
    "storage/",
    "terminal/",
    "data/",
    "launch/",
    "sweep/",
    "models/config/",
    "models/families/",
    "formats/hf_download.py",
    "formats/files.py",
    "runs/run_dir.py",
    "runs/lock.py",
    "runtime/xla_flags.py",
    "runtime/allocator.py",
    "runtime/signals.py",
    "sharding/hardware.py",
    "planning/collectives.py",
    "planning/aot_process.py",
    "cli/dispatch.py",
    "cli/load.py",
    "cli/arguments.py",
    "cli/launch_arguments.py",
    "cli/weights_arguments.py",
    "cli/verbs/",
    "errors.py",
    "__main__.py",
    "__init__.py",
)
ONLY_IN = {
    "qwix": {"adapters/lora.py", "adapters/qat.py"},
    "orbax": {"runs/checkpointer.py", "weights/orbax.py"},
    "huggingface_hub": {"formats/hf_download.py"},
    "cattrs": {"config/core/serialization.py"},
    "tokenizers": {"data/tokenizers/huggingface.py"},
    "jinja2": {"data/tokenizers/chat_template.py"},
    "submitit": {"launch/slurm_engine.py"},
    "ray": {"launch/ray_engine.py"},
    "optuna": {"sweep/optuna_search.py"},
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
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or name.count(".") == 0 else node.module for name in names}
            found |= names & MODULES
    return found


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    """The room of a file; a file that is a room by itself has its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_known(path: Path) -> set[str]:
    modules = [module for module in imports(path) if module.startswith("nnxdsl.")]
    return {module.split(".")[1] for module in modules} - {room(path)}


def test_every_room_has_a_rank() -> None:
    rooms = {room(path) for path in FILES if path.parent != PACKAGE or path.name == "errors.py"}
    assert rooms == set(RANKS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows_go_one_way(path: Path) -> None:
    if room(path) in RANKS:
        wrong = {other for other in rooms_known(path) if RANKS[other] >= RANKS[room(path)]}
        assert not wrong, f"{room(path)} must not know {sorted(wrong)}"


def test_no_room_is_a_heap() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) - 1 for folder in {path.parent for path in FILES}}
    assert {name(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_every_room_says_what_it_is_for() -> None:
    for folder in {path.parent for path in FILES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), name(folder)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_jax_stays_in_its_rooms(path: Path) -> None:
    if not name(path).startswith(WITHOUT_JAX):
        return
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & set(JAX)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_known_to_one_file(library: str) -> None:
    users = {name(path) for path in FILES if any(m.split(".")[0] == library for m in imports(path))}
    assert users <= ONLY_IN[library]


def test_losses_know_no_model() -> None:
    known = imports(PACKAGE / "losses/base.py")
    assert not any(module.startswith(("nnxdsl.models", "nnxdsl.adapters", "flax")) for module in known)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_says_what_it_knows_and_is_not_too_long(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "begin with one sentence that says what the file knows"
    assert len(text.splitlines()) <= 600


def test_ci_runs_the_readmes_command() -> None:
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest"
    assert command in (ROOT / ".ci/run").read_text()
    assert command in (ROOT / "README.md").read_text()
