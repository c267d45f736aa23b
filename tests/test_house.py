"""The rooms of the library: their ranks, which room may know which, and which file may use which library."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nnxdsl"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """As it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}

RANKS = {
    "errors": 0,
    **dict.fromkeys(("config", "storage", "terminal"), 1),
    **dict.fromkeys(("data", "models", "runtime"), 2),
    **dict.fromkeys(("formats", "sharding", "optim", "runs"), 3),
    **dict.fromkeys(("adapters", "losses", "launch", "tracking"), 4),
    "program": 5,
    **dict.fromkeys(("planning", "weights", "sweep"), 6),
    "generate": 7,
    **dict.fromkeys(("rollouts", "serve"), 8),
    **dict.fromkeys(("trainer", "app"), 9),
    "cli": 10,
}
"""A room may import rooms of lower rank, for type checkers as well."""

UPWARD_TYPES = {
    "config/model.py": {"models"},  # Model.Gemma3 is the class of a family, whose base is Model
    "config/experiment.py": {"trainer"},  # Experiment.run returns a Result
    "config/sweep.py": {"trainer"},  # Sweep.run returns a SweepResult
}
"""Files with attributes whose types are of a room above, which they import for type checkers alone."""

MOST_FILES = 20
CATALOGUES = ("models/families",)
"""Rooms with a file for each entry of one table, as many as there are."""
JAX = ("jax", "flax", "optax", "orbax", "qwix", "jaxtyping")
WITHOUT_JAX = (
    "config/",
    "storage/",
    "terminal/",
    "data/",
    "launch/",
    "sweep/",
    "tracking/",
    "models/config/",
    "models/families/",
    "formats/hf_download.py",
    "formats/files.py",
    "runs/run_dir.py",
    "runs/run_list.py",
    "runs/rows.py",
    "runs/lock.py",
    "runtime/xla_faults.py",
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
    "app.py",
    "errors.py",
    "__main__.py",
    "__init__.py",
)
ONLY_IN = {
    "qwix": {"adapters/weight_only_quant.py", "adapters/qat.py"},
    "orbax": {"runs/checkpointer.py", "runs/checkpoint_reader.py", "weights/orbax.py"},
    "huggingface_hub": {"formats/hf_download.py"},
    "cattrs": {"config/core/serialization.py"},
    "tokenizers": {"data/tokenizers/huggingface.py", "data/tokenizers/bytes_as_hf.py"},
    "jinja2": {"data/tokenizers/chat_template.py"},
    "submitit": {"launch/slurm_engine.py"},
    "ray": {"launch/ray_engine.py"},
    "optuna": {"sweep/optuna_search.py", "sweep/importance.py"},
    "math_verify": {"data/rewards/math_worker.py"},
}


@functools.cache
def imports(path: Path, *, types: bool = False) -> frozenset[str]:
    """Every module that a file imports when it is loaded or run, by name as well; or for type checkers alone, too."""
    result: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= {name if name in MODULES or name.count(".") == 0 else node.module for name in names}
            result |= names & MODULES
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            result |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)} & MODULES
    return frozenset(result)


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    """The room of a file; a file that is a room by itself has its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_known(path: Path, *, types: bool = False) -> set[str]:
    modules = [module for module in imports(path, types=types) if module.startswith("nnxdsl.")]
    return {module.split(".")[1] for module in modules} - {room(path)}


def rooms_above(path: Path, *, types: bool) -> set[str]:
    """The rooms that a file imports, except those of lower rank."""
    return {other for other in rooms_known(path, types=types) if RANKS[other] >= RANKS[room(path)]}


def test_every_room_has_a_rank() -> None:
    rooms = {room(path) for path in FILES if path.parent != PACKAGE or path.name in ("errors.py", "app.py")}
    assert rooms == set(RANKS)


@pytest.mark.parametrize("path", [*FILES, *PACKAGE.rglob("*.pyi")], ids=name)
def test_arrows_go_one_way(path: Path) -> None:
    if room(path) in RANKS:
        assert "nnxdsl" not in imports(path, types=True)  # the package itself, which is above all rooms
        assert rooms_above(path, types=False) == set()
        assert rooms_above(path, types=True) == UPWARD_TYPES.get(name(path), set())


def test_no_room_is_a_heap() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) - 1 for folder in {path.parent for path in FILES}}
    heaps = {name(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert {folder: count for folder, count in heaps.items() if folder not in CATALOGUES} == {}


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


TEST_FOLDERS = {
    "app": "the web app",
    "faults": "kills, damage, full disks",
    "fixtures": "what tests of several rooms use",
    "golden": "recipes as text",
    "launchers": "real engines",
    "packages": "third parties' packages",
    "reference": "stored figures and the scripts that make them",
    "regression": "results that a refactoring must not change",
}
"""Folders of tests that are no room of the library."""


def test_tests_live_in_the_rooms_they_test() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/*.py")}
    assert folders - set(TEST_FOLDERS) <= set(RANKS)


def test_no_room_imports_itself_in_a_circle() -> None:
    """Among the files of one room, imports by name as well."""
    graph = {
        module: {other for other in imports(path) if f"{other}.".startswith(f"nnxdsl.{room(path)}.")}
        for path in FILES
        if (module := module_name(path)).count(".") > 1
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a circle


def test_ci_runs_the_readmes_command() -> None:
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest"
    assert command in (ROOT / ".ci/run").read_text()
    assert command in (ROOT / "README.md").read_text()


APP = sorted((ROOT / "app").rglob("*.py"))

ALLOWED_GETATTR = {
    ("nnxdsl/program/diloco.py", "name"),  # a key of a jax tree path
    ("nnxdsl/program/blueprint.py", "key"),  # a key of a jax tree path
    ("nnxdsl/program/blueprint.py", "name"),  # a key of a jax tree path
    ("nnxdsl/program/attention_kernel.py", "compute_capability"),  # a jax device
    ("nnxdsl/program/compile.py", "sharding"),  # an array of jax or numpy
    ("nnxdsl/weights/orbax.py", "shape"),  # what orbax says of an array
    ("nnxdsl/weights/orbax.py", "dtype"),  # what orbax says of an array
    ("nnxdsl/storage/jsonl.py", "item"),  # a scalar of jax or numpy
    ("nnxdsl/storage/jsonl.py", "size"),  # a scalar of jax or numpy
    ("nnxdsl/formats/files.py", "strerror"),  # an exception that may be an OSError
    ("nnxdsl/data/user_code.py", "__qualname__"),  # a user's function
    ("nnxdsl/sharding/mesh.py", "slice_index"),  # a jax device
    ("app/view.py", "host"),  # a client of starlette
}
"""Files and attributes of foreign objects that may be missing; a spec's family declares a default instead."""

DIALECT = frozenset(
    {
        *("asked", "said", "kept", "known", "taught", "apart", "going", "appearing", "doubt", "settled", "standing"),
        *("became", "noted", "complaint", "sunk", "says", "tells", "fewest"),
    }
)
"""Words of no field, which are in no name; see `names`."""
VAGUE = frozenset(
    {
        *("found", "own", "given", "told", "there", "words", "how", "few", "drawn", "together", "at", "are", "gist"),
        *("put_back", "look", "answered"),
    }
)
"""Words that are no whole name of anything, in tests and benchmarks too: they say nothing of what it is."""


def defaults_of_getattr(tree: ast.AST) -> list[str]:
    """The attribute of every `getattr(x, "attribute", default)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"]
    return [str(call.args[1].value) for call in calls if len(call.args) == 3 and isinstance(call.args[1], ast.Constant)]


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that a file defines: functions, classes, arguments, variables, attributes, imports under a name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.ExceptHandler(name=str(result)) | ast.MatchAs(name=str(result)) | ast.MatchStar(name=str(result)):
                yield result
            case ast.alias(asname=str(result)):
                yield result
            case _:
                pass


def stems(identifier: str) -> set[str]:
    """The words of a name, split at underscores and camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def in_dialect(tree: ast.AST) -> set[str]:
    return {result for result in names(tree) if stems(result) & DIALECT or {"few", "bits"} <= stems(result)}


def test_specs_declare_their_defaults() -> None:
    actual = {
        (path.relative_to(ROOT).as_posix(), attribute)
        for path in (*FILES, *APP)
        for attribute in defaults_of_getattr(ast.parse(path.read_text()))
    }
    assert actual - ALLOWED_GETATTR == set()


def test_names_are_words_of_the_field() -> None:
    actual = {path.relative_to(ROOT).as_posix(): in_dialect(ast.parse(path.read_text())) for path in (*FILES, *APP)}
    assert {path: sorted(identifiers) for path, identifiers in actual.items() if identifiers} == {}


def test_no_name_is_vague() -> None:
    rooms = ("nnxdsl", "app", "tests", "benchmarks", "experiments", "docs")
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))
        if path != ROOT / "tests" / "reference" / "tool_functions.py"  # the names of a tool's arguments are recorded
        for name in names(ast.parse(path.read_text()))
        if name.strip("_").lower() in VAGUE
    ]
    assert vague == []


def test_what_these_sweeps_find() -> None:
    planted = (
        'def asked_of(x, *, isKept=0):\n    self.few_bits = getattr(x, "start", None)\n    return x.said, known_by(x)\n'
    )
    assert defaults_of_getattr(ast.parse(planted)) == ["start"]
    assert in_dialect(ast.parse(planted)) == {
        "asked_of",
        "isKept",
        "few_bits",
    }  # names that are defined, not those used
    assert in_dialect(ast.parse("import x as Taught\nfor going in apartment: unknown = taskedly = 1")) == {
        "Taught",
        "going",
    }


APP_ROOMS = (
    "markup",
    "formatting",
    "client",
    "view",
    "settings",
    "store",
    "processes",
    "components",
    "security",
)
"""Rooms and files of the app, each of which imports only those before it; state, pages and site follow."""


def test_rooms_of_the_app_import_those_below() -> None:
    actual: list[str] = []
    for path in APP:
        parts = path.relative_to(ROOT / "app").with_suffix("").parts
        if parts[0] not in APP_ROOMS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):  # from the app's root
                room = (node.module or node.names[0].name).partition(".")[0]
                if room not in APP_ROOMS or APP_ROOMS.index(room) > APP_ROOMS.index(parts[0]):
                    actual.append(f"{path.relative_to(ROOT)} imports {room}")
    assert actual == []
