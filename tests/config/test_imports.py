"""Names in data are imported only where the user allowed it, anywhere in a tree."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import nnxdsl
from nnxdsl import (
    Data,
    Objective,
    PlanError,
    Reward,
    Sweep,
    allow_imports,
    cli,
    from_dict,
    from_json,
    to_dict,
    to_json,
    to_python,
)
from nnxdsl.config.core.base import Spec, declared, is_family, registry, third_party
from nnxdsl.config.core.imports import VARIABLE, allow_names_in, refusal
from nnxdsl.data.rewards import Rewards, Sampled
from nnxdsl.errors import SpecError
from tests.waiting import HANG_SECONDS

PACKAGES = Path(__file__).parent / "packages"
CLASS = {"type": "her_lab:Hers"}
IMPORTING = (
    "importlib.import_module",
    "import_module",
    "resolve_name",
    "__import__",
    "exec",
    "eval",
    "runpy.run_path",
    "runpy.run_module",
)
HINT = (
    "'her_lab:longest' would import the module 'her_lab', which is not allowed; if you trust it, allow it with "
    "--allow her_lab, NNXDSL_ALLOW=her_lab or nnxdsl.allow_imports('her_lab')"
)


@pytest.fixture(autouse=True)
def unallowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is allowed, and her_lab can be imported but has not been."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.syspath_prepend(str(PACKAGES))
    forget()
    yield
    forget()


def forget() -> None:
    sys.modules.pop("her_lab", None)
    third_party.pop("her_lab:Hers", None)
    for name in ("HER_LAB_WAS_IMPORTED", "HER_LAB_WAS_CALLED"):
        os.environ.pop(name, None)


def was_imported() -> bool:
    return "her_lab" in sys.modules or "HER_LAB_WAS_IMPORTED" in os.environ


def refused(tree: Any, expected: type[Spec] = Spec) -> str:
    with pytest.raises(SpecError) as caught:
        from_dict(tree, expected)
    assert not was_imported()
    return str(caught.value)


def holding(reward: str, design: Any) -> Any:
    """An experiment whose objective is worth what a function says."""
    objective = Objective.GRPO(rewards=(Reward(reward),))
    return design(objective=objective, data=Data.Prompts("prompts.jsonl"), evaluation=None)


NODES = sorted(name for name, cls in registry.items() if not is_family(cls))


@pytest.mark.parametrize("name", NODES)
def test_no_field_of_any_spec_imports_a_class(name: str) -> None:
    cls = registry[name]
    for family in {cls, cls.family}:
        assert "her_lab" in refused(CLASS, family)
    for field in declared(cls):
        for value in (CLASS, [CLASS], [[CLASS]], {"x": CLASS}, [{"type": "DPO", "beta": CLASS}]):
            refused({"type": cls.tag, field: value}, cls)


@pytest.mark.extended
def test_one_file_imports_what_data_names() -> None:
    """Elsewhere modules are imported by names that stand in the code."""
    root = Path(nnxdsl.__file__).parent
    actual: set[str] = set()
    for path in [*root.rglob("*.py"), *(root.parent / "app").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTING:
                first = node.args[0]
                if not isinstance(first, ast.Constant):
                    actual.add(f"{path.relative_to(root.parent).as_posix()}: {ast.unparse(first)}")
    assert actual == {
        "nnxdsl/config/core/imports.py: module",
        "nnxdsl/config/core/fields.py: annotation",  # of a class that is being declared
        "nnxdsl/__init__.py: _LAZY[name]",
        "nnxdsl/cli/dispatch.py: f'{verbs.__name__}.{name}'",  # a module of the package
        "nnxdsl/cli/dispatch.py: f'{verbs.__name__}.{verb}'",
        "nnxdsl/app.py: f'{whole}.{name}'",  # constants of its callers
        "nnxdsl/models/families/__init__.py: f'{__name__}.{_module.name}'",  # files of the package
        "nnxdsl/models/mixer.py: config.module",  # a constant of a mixer's config class
        "nnxdsl/models/feed_forward.py: config.module",  # a constant of a feed-forward's config class
        "nnxdsl/data/sources/tables.py: f'pyarrow{module}'",  # a constant of its callers
        "nnxdsl/runtime/compile_cache.py: module",
        "nnxdsl/launch/engines.py: launcher.library or __name__",  # a constant of its class
        "nnxdsl/launch/engines.py: module",  # a constant of a launcher's class
    }


def test_all_names_are_refused_at_once_with_their_paths(design: Any) -> None:
    tree = to_dict(holding("her_lab:longest", design))
    tree["objective"]["rewards"].append({"type": "Reward", "name": "os:system", "weight": 1.0})
    lines = refused(tree).splitlines()
    assert lines[0].startswith("2 problems in Experiment")
    assert lines[1] == f"  objective.rewards.0.name: {HINT}"
    assert lines[2].startswith("  objective.rewards.1.name: 'os:system' would import the module 'os'")
    nested = to_dict(design(objective=design().objective))
    nested["model"]["weights"] = {"type": "From", "experiment": {**tree}}
    del nested["model"]["weights"]["experiment"]["schema"]
    assert "model.weights.experiment.objective.rewards.1.name: 'os:system'" in refused(nested)


def test_a_module_that_is_loaded_is_not_allowed_for_that(design: Any) -> None:
    assert "os" in sys.modules
    with pytest.raises(PlanError, match=r"objective\.rewards\.0\.name: 'os:system' would import the module 'os'"):
        Rewards((Reward("os:system"),))


@pytest.mark.parametrize("allowed", ["her_lab", "her_lab:longest"])
def test_what_is_allowed_is_imported(allowed: str, design: Any) -> None:
    allow_imports(allowed)
    assert from_dict(to_dict(Reward("her_lab:longest"))) == Reward("her_lab:longest")
    assert not was_imported()  # it is imported where it is called
    assert Rewards((Reward("her_lab:longest"),)).score(Sampled(["four"], [[1]], [{}], [""])).values == [[4.0]]
    if allowed == "her_lab":
        assert type(from_dict(CLASS, Objective)).__name__ == "Hers"


def test_a_name_allows_itself_and_no_other() -> None:
    allow_imports("her_lab:longest", "my_lab")
    assert refusal("my_lab.simpo:SimPO") is None
    assert refusal("my_lab") is None
    for name in ("her_lab:Hers", "her_lab:longest.__globals__", "my_laboratory:x", "os:system", "my_lab:", "her_lab"):
        assert (refusal(name) is None) == (name == "my_lab:"), name
    assert "her_lab:Hers" in refused(CLASS, Objective)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a:b:c", ".a", "a.", "../a", "a/b", "*", "a:"])
def test_what_is_no_module_cannot_be_allowed(name: str) -> None:
    with pytest.raises(SpecError, match="expected a module or module:name"):
        allow_imports(name)
    assert os.environ[VARIABLE] == ""


def test_a_class_that_is_defined_needs_no_import(design: Any) -> None:
    simpo = sys.modules["my_lab.simpo"]
    experiment = design(objective=simpo.SimPO())
    assert from_dict(to_dict(experiment)) == experiment
    assert from_json(to_json(experiment)) == experiment


def test_names_in_the_users_own_code_are_allowed(design: Any) -> None:
    simpo = sys.modules["my_lab.simpo"]
    sweep = Sweep(design(), [{"objective": simpo.SimPO()}, {"objective.beta": 0.3}])
    allow_names_in((sweep, {"x": [holding("her_lab:longest", design)]}))
    assert os.environ[VARIABLE] == "her_lab:longest,my_lab.simpo:SimPO"
    assert not was_imported()


@attrs.frozen
class Done:
    code: int
    out: str
    err: str


def command(place: Path, *argv: str, **variables: str) -> Done:
    paths = os.pathsep.join([str(PACKAGES), str(Path(__file__).parents[2])])
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=place,
        env={**clean, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert "Traceback" not in done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_command_line_reads_a_file_as_data_and_runs_python(design: Any, tmp_path: Path) -> None:
    experiment = holding("her_lab:longest", design)
    (tmp_path / "x.json").write_text(to_json(experiment))
    (tmp_path / "x.py").write_text(to_python(experiment))
    refused = command(tmp_path, "-m", "nnxdsl", "show", "x.json")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"SpecError: 1 problem in x.json\n  objective.rewards.0.name: {HINT}\n"
    for argv in (["x.json", "--allow", "her_lab"], ["x.json", "--allow", "her_lab:longest"], ["x.py"]):
        done = command(tmp_path, "-m", "nnxdsl", "show", *argv, "--json")
        assert (done.code, done.err) == (0, "")
        assert json.loads(done.out) == to_dict(experiment)
    assert command(tmp_path, "-m", "nnxdsl", "show", "x.json", NNXDSL_ALLOW="his_lab, her_lab").code == 0
    assert command(tmp_path, "x.py", "show").code == 0
    for verb in ("plan", "run", "launch"):
        refused = command(tmp_path, "-m", "nnxdsl", verb, "x.json")
        assert (refused.code, refused.err.count(HINT)) == (2, 1), verb
    assert not [path.name for path in tmp_path.iterdir() if path.name not in ("x.json", "x.py", "__pycache__")]
    unused = command(tmp_path, "-m", "nnxdsl", "runs", "--allow", "her_lab")
    assert (unused.code, unused.err) == (2, "UsageError: --allow has no effect on runs\n")


def test_what_a_person_types_is_allowed(design: Any) -> None:
    plain = holding("exact_answer", design)
    changed = cli.override(plain, ['objective.rewards=(Reward("her_lab:longest"),)'])
    assert changed.objective.rewards == (Reward("her_lab:longest"),)
    assert refusal("her_lab:longest") is None
    assert refusal("her_lab:Hers") is not None
