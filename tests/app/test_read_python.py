"""Pasted text: what nnxdsl writes is read back, and anything that would have to be run is refused where it stands."""

from __future__ import annotations

import json

import pytest

from app.store.experiments import from_text
from nnxdsl import Data, Model, SpecError, Weights, to_json, to_python
from tests.app.many import experiment

HEAD = "from nnxdsl import *\n"


@pytest.mark.parametrize(
    "made",
    [
        experiment(1),
        experiment(2, model=Model.Gemma3("tiny", weights=Weights.From(experiment(1))), adapter=None, notes='a "b" \n'),
        experiment(3, data=Data.Preferences("a.jsonl", template_args={"thinking": True, "of": ["a", None]})),
    ],
    ids=["plain", "nested", "names and values"],
)
def test_what_is_written_is_read_back(made) -> None:
    assert from_text(to_python(made)) == made
    assert from_text(to_json(made)) == made


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import os", "import os is not understood"),
        ("from os import *", "is not understood"),
        ("from nnxdsl.config.core import serialization", "is not understood"),
        ("experiment = open('/etc/passwd')", "there is no 'open'"),
        ("experiment = __import__('os').system('true')", "there is no"),
        ("experiment = (lambda: 1)()", "there is no"),
        ("experiment = [x for x in (1, 2)]", "neither a literal nor a constructor call"),
        ("experiment = Experiment.__init__", "neither a literal nor a constructor call"),
        ("experiment = Mesh(**{})", "* and ** are not understood"),
        ("experiment = f'{1}'", "neither a literal nor a constructor call"),
        ("experiment = 2 ** 99999999", "neither a literal nor a constructor call"),
        ("experiment = Objective()", "is a family"),
        ("experiment = Objective.DPP()", "did you mean"),
        ("for i in (1,): pass", "is not understood"),
        ("class A: pass", "is not understood"),
        ("def f(): pass", "is not understood"),
        ("experiment.x = 1", "is not understood"),
        ("experiment = unknown", "neither a literal nor a constructor call"),
        ("print('x')", "is not understood"),
    ],
)
def test_what_would_have_to_run_is_refused_with_its_place(line: str, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_text(HEAD + line)
    assert text in str(caught.value)
    assert "line 2, column 1" in str(caught.value) or "line 2, column 14" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "paste the Python"),
        ("x = (", "is no Python"),
        ("x = 1\0", "is no Python"),
        ("(" * 5_000, "nested too deeply"),
        ("x = " + "-" * 100_000 + "1", "is no Python"),
        ("x = a" + ".a" * 50_000, "is no Python"),
        ("x = {[]: 1}", "is no Python"),
        ("x" * 300_000, "characters; expected at most"),
        ("x = 1", "there is no `experiment"),
        ("experiment = Mesh()", "it is Mesh"),
        ('{"type": "Mesh"}', "expected"),
        ("{", "not JSON"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested too deeply"),
    ],
)
def test_texts_that_are_no_experiment(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_text(text)
    assert message in str(caught.value)


def test_classes_of_others_are_not_imported() -> None:
    tree = json.loads(to_json(experiment(1)))
    tree["objective"] = {"type": "antigravity:Fly"}
    with pytest.raises(SpecError, match=r"objective: 'antigravity:Fly' would import the module"):
        from_text(json.dumps(tree))


def test_problems_of_a_constructor_have_their_line() -> None:
    with pytest.raises(SpecError, match=r"rank: expected a value > 0, got 0 \(line 2\)"):
        from_text(HEAD + "experiment = Adapter.LoRA(rank=0)")
