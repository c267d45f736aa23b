"""Third-party spec classes: used, written, read and generated like the built-in ones; invalid ones refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from my_lab import other, simpo

from nnxdsl import (
    Data,
    Model,
    Objective,
    Optimizer,
    Spec,
    SpecError,
    Weights,
    diff,
    evolve,
    from_dict,
    to_dict,
    to_json,
    to_python,
)
from nnxdsl.config.core.docstrings import field_docs


def test_it_is_a_member_like_any_other(design: Any) -> None:
    experiment = design(objective=simpo.SimPO(gamma=1.5))
    assert to_dict(experiment)["objective"] == {"type": "my_lab.simpo:SimPO", "beta": 2.0, "gamma": 1.5}
    assert from_dict(to_dict(experiment)) == experiment
    assert evolve(experiment, {"objective.gamma": 2}).objective == simpo.SimPO(gamma=2.0)
    assert experiment.id != design().id
    assert type(simpo.SimPO().gamma) is float
    assert field_docs(simpo.SimPO)["gamma"] == "Margin between them."


def test_its_errors_are_as_good(design: Any) -> None:
    with pytest.raises(SpecError) as caught:
        simpo.SimPO(gama=1, beta=0)  # type: ignore[call-arg]
    assert str(caught.value) == (
        "2 problems in SimPO\n"
        "  gama: SimPO has no field 'gama'; did you mean 'gamma'?\n"
        "  beta: expected a value > 0, got 0.0"
    )
    with pytest.raises(SpecError) as caught:
        design(objective=simpo.SimPO(), data=Data.Text("text.jsonl"))
    assert str(caught.value) == (
        "1 problem in Experiment 'dpo-gemma3-1b'\n"
        "  data: SimPO reads preference pairs, Data.Text yields texts; use Data.Preferences"
    )


def test_specs_in_tuples_have_paths(design: Any) -> None:
    mixed = design(data=simpo.Mixture(path="both", sources=(Data.Preferences("a"), Data.Preferences("b"))))
    changed = evolve(mixed, {"data.sources.1.max_prompt_length": 8})
    assert changed.data.sources == (Data.Preferences("a"), Data.Preferences("b", max_prompt_length=8))
    assert diff(mixed, changed) == {"data.sources.1.max_prompt_length": 8}
    with pytest.raises(SpecError) as caught:
        evolve(mixed, {"data.sources.1.max_prompt": 8})
    assert str(caught.value) == (
        "1 problem in Experiment 'dpo-gemma3-1b'\n"
        "  data.sources.1.max_prompt: Preferences has no field 'max_prompt'; did you mean 'max_prompt_length'?"
    )


def test_a_fresh_process_loads_it(design: Any, packages: Path, tmp_path: Path) -> None:
    experiment = design(objective=simpo.SimPO(gamma=1.5))
    (tmp_path / "experiment.json").write_text(to_json(experiment))
    (tmp_path / "experiment.py").write_text(to_python(experiment))
    assert to_python(experiment).startswith("from my_lab.simpo import SimPO\nfrom nnxdsl import (\n    Adapter,\n")
    code = (
        "import sys\n"
        "from nnxdsl import allow_imports, from_json\n"
        "assert 'my_lab' not in sys.modules\n"
        "allow_imports('my_lab')\n"
        "read = from_json(open('experiment.json').read())\n"
        "import experiment\n"
        "assert read == experiment.experiment\n"
        "print(read.id)\n"
    )
    path = os.pathsep.join([str(packages), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == experiment.id


def test_two_classes_of_one_name_keep_their_modules_apart(design: Any) -> None:
    earlier = design(objective=other.SimPO(margin=1), quantization=None)
    staged = design(objective=simpo.SimPO(), model=Model.Gemma3("1b", weights=Weights.From(earlier)))
    source = to_python(staged)
    assert "import my_lab.other\nimport my_lab.simpo\n" in source
    space: dict[str, Any] = {}
    exec(source, space)
    assert space["experiment"] == staged


def test_a_class_that_cannot_be_imported_again(design: Any) -> None:
    @attrs.frozen(kw_only=True)
    class Hidden(Objective):
        batch_kind: ClassVar[str] = "pairs"

    experiment = design(objective=Hidden())
    name = "Hidden cannot be imported again; put the class in a module of its own"
    for write in (to_dict, to_python):
        with pytest.raises(SpecError, match=name):
            write(experiment)


BANNED: dict[str, tuple[object, str]] = {
    "number": (int | float, "int or float leaves open which of int and float is meant"),
    "flag": (bool | int, "bool or int leaves open which of bool and int is meant"),
    "dict": (dict[str, int], "dict[str, int] is not understood"),
    "list": (list[int], "list[int] is not understood"),
    "bare tuple": (tuple, "tuple is not understood"),
    "Any": (Any, "Any is not understood"),
    "object": (object, "object is not understood"),
    "inside a tuple": (tuple[dict[str, int], ...], "dict[str, int] is not understood"),
    "two tuples": (
        tuple[int, ...] | tuple[str, ...],
        "tuple[int, ...] or tuple[str, ...] leaves open which of tuple[int, ...] and tuple[str, ...] is meant",
    ),
    "two families": (
        Objective | Optimizer,
        "Objective or Optimizer leaves open which of Objective and Optimizer is meant",
    ),
    "function": (Callable[[], int], "collections.abc.Callable[[], int] is not understood"),
}


@pytest.mark.parametrize("case", BANNED)
def test_annotations_that_json_could_not_tell_apart(case: str) -> None:
    annotation, message = BANNED[case]
    banned = attrs.frozen(kw_only=True)(type("Banned", (Objective,), {"__annotations__": {"x": annotation}}))
    with pytest.raises(TypeError) as caught:
        banned(x=1)
    assert str(caught.value) == (
        f"{banned.__module__}.Banned.x: {message}; a field holds int, float, str, bool, Literal, "
        "a spec class or family, tuple[...] of these, Json, or one of these or None"
    )


def test_an_annotation_that_names_nothing() -> None:
    @attrs.frozen(kw_only=True)
    class Lost(Objective):
        x: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match=r"Lost\.x: annotation Nowhere: name 'Nowhere' is not defined"):
        Lost(x=1)


def test_a_default_of_another_type() -> None:
    @attrs.frozen(kw_only=True)
    class Off(Objective):
        x: int = "3"  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Off\.x: wrong default: expected int, got '3'"):
        Off()


def declare(**options: object) -> type[Spec]:
    class Loose(Objective):
        x: int = 3

    return attrs.define(**options)(Loose)  # type: ignore[call-overload, no-any-return]


DECLARATIONS: dict[str, Callable[[], object]] = {
    "not keyword-only": lambda: declare(frozen=True),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_declarations_that_lack_something(case: str) -> None:
    with pytest.raises(TypeError, match=r"Loose must be declared with @attrs\.frozen\(kw_only=True\)"):
        DECLARATIONS[case]()


def test_a_class_that_is_not_frozen() -> None:
    class Plain(Objective):
        x: int = 3

    with pytest.raises(TypeError, match=r"Plain must be declared with @attrs\.frozen\(kw_only=True\)"):
        Plain()
    with pytest.raises(TypeError, match=r"with __init__, __eq__ and __repr__ left to attrs"):

        @attrs.frozen(kw_only=True)
        class Hooked(Objective):
            def __attrs_post_init__(self) -> None: ...


OPTIONS: dict[str, tuple[str, object]] = {
    "a converter": ("x", attrs.field(default=1, converter=int)),
    "no place in __init__": ("x", attrs.field(default=1, init=False)),
    "no part in equality": ("x", attrs.field(default=1, eq=False)),
    "an alias": ("x", attrs.field(default=1, alias="y")),
    "a factory": ("x", attrs.field(factory=int)),
    "a private name": ("_x", attrs.field(default=1)),
    "the name of the tag": ("type", attrs.field(default=1)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_fields_that_would_break_the_laws(case: str) -> None:
    name, field = OPTIONS[case]
    body = {name: field, "__annotations__": {name: int}}
    with pytest.raises(TypeError, match=rf"Odd\.{name}: "):
        attrs.frozen(kw_only=True)(type("Odd", (Objective,), body))
