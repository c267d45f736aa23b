"""Generated Python, and the values of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnxdsl import (
    BadRows,
    Data,
    Evaluation,
    Experiment,
    Mesh,
    Objective,
    Schedule,
    SpecError,
    Weights,
    evolve,
    to_python,
)
from nnxdsl.config.core.base import members_hint
from nnxdsl.config.core.codegen import LONGEST_LITERAL, parse_value, render

RUFF = Path(sys.executable).with_name("ruff")

DESIGN = """\
from nnxdsl import (
    Adapter,
    Data,
    Evaluation,
    Experiment,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Quantization,
    Schedule,
    Weights,
)

experiment = Experiment(
    name="dpo-gemma3-1b",
    model=Model.Gemma3("1b", weights=Weights.HF("google/gemma-3-1b-it")),
    data=Data.Preferences("data/ultrafeedback.jsonl"),
    objective=Objective.DPO(),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-06)),
    steps=2000,
    batch_size=64,
    adapter=Adapter.LoRA(),
    quantization=Quantization.NF4(),
    mesh=Mesh(fsdp=4, tensor=2),
    microbatch_size=8,
    evaluation=Evaluation(every_steps=200, prompts=("Explain DPO to a child.",)),
)

if __name__ == "__main__":
    experiment.main()
"""


def test_the_first_example(design: Any) -> None:
    assert to_python(design()) == DESIGN


def test_a_part_alone() -> None:
    assert to_python(Mesh(fsdp=2), "mesh") == "from nnxdsl import Mesh\n\nmesh = Mesh(fsdp=2)\n"


def test_what_is_long_is_wrapped(design: Any) -> None:
    prompts = (
        "Why is the sky blue?",
        'What does "idempotent" mean?',
        "It's raining:\nwhat now?",
        "日本" * 20,
    )
    source = to_python(design(evaluation=Evaluation(every_steps=200, prompts=prompts)))
    assert (
        """    evaluation=Evaluation(
        every_steps=200,
        prompts=(
            "Why is the sky blue?",
            'What does "idempotent" mean?',
            "It's raining:\\nwhat now?",
            "日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本日本",
        ),
    ),
"""
        in source
    )


def laid_out(sources: list[str], directory: Path) -> list[str]:
    """What ruff makes of the sources: its check of imports and names, and its layout."""
    paths = [directory / f"source_{index}.py" for index in range(len(sources))]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source)
    files = [str(path) for path in paths]
    lint = ["check", "--quiet", "--isolated", "--fix", "--line-length", "100", "--select", "I,F,W", *files]
    for arguments in (lint, ["format", "--quiet", "--isolated", "--line-length", "100", *files]):
        subprocess.run([str(RUFF), *arguments], check=True, capture_output=True, cwd=directory)
    return [path.read_text() for path in paths]


@pytest.mark.slow
@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed")
def test_ruff_leaves_generated_code_as_it_is(tmp_path: Path) -> None:
    sources: list[str] = []

    @settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.from_type(Experiment))
    def collect(experiment: Experiment) -> None:
        source = to_python(experiment)
        if max(source) < "\u0300":  # beyond it, versions of Unicode differ in how wide a few characters are
            sources.append(source)

    collect()
    assert len(sources) > 10
    for given_text, left in zip(sources, laid_out(sources, tmp_path), strict=True):
        assert left == given_text


RENDERED: dict[str, tuple[object, str]] = {
    "small float": (5e-6, "5e-06"),
    "great float": (1e16, "1e16"),
    "text": ("a", '"a"'),
    "single quote": ("it's", '"it\'s"'),
    "double quotes": ('"a"', "'\"a\"'"),
    "both quotes": ("'\"", '"\'\\""'),
    "control": ("a\n\t\\\x00é", '"a\\n\\t\\\\\\x00é"'),
    "tuple of one": (("a",), '("a",)'),
    "no items": ((), "()"),
    "None": (None, "None"),
    "JSON": ({"a": [1, {"b": None}], "c": "d"}, '{"a": [1, {"b": None}], "c": "d"}'),
    "spec": (Weights.HF("a"), 'Weights.HF("a")'),
    "specs": ((Objective.DPO(beta=0.5), Data.Text("t")), '(Objective.DPO(beta=0.5), Data.Text("t"))'),
}


@pytest.mark.parametrize("case", RENDERED)
def test_rendered_values_read_back(case: str) -> None:
    value, text = RENDERED[case]
    assert render(value) == text
    assert parse_value(text) == value


PARSED: dict[str, tuple[str, object]] = {
    "int": ("-3", -3),
    "float": ("-5e-6", -5e-6),
    "plus": ("+1", 1),
    "None": ("None", None),
    "True": ("True", True),
    "quoted": ("'2'", "2"),
    "word": ("float32", "float32"),
    "path": ("runs/my-run", "runs/my-run"),
    "sentence": ("What is 1 + 1?", "What is 1 + 1?"),
    "sum": ("1 + 1", "1 + 1"),
    "attribute": ("os.path", "os.path"),
    "comprehension": ("[x for x in y]", "[x for x in y]"),
    "nested": ("(('mlp', ('data', 'fsdp')), ('vocab', None))", (("mlp", ("data", "fsdp")), ("vocab", None))),
    "call": ("Objective.DPO(beta=0.2)", Objective.DPO(beta=0.2)),
    "without a name": ("Weights.HF('a')", Weights.HF("a")),
    "calls in calls": (
        "Data.Text('t', bad_rows=BadRows.Skip(at_most=3))",
        Data.Text("t", bad_rows=BadRows.Skip(at_most=3)),
    ),
    "calls in a tuple": (
        "(Schedule.Constant(lr=1), BadRows.Stop())",
        (Schedule.Constant(lr=1.0), BadRows.Stop()),
    ),
    "many brackets": ("[" * 5000, "[" * 5000),
    "many signs": ("-" * 9000 + "1", "-" * 9000 + "1"),
    "many digits": ("1" * 5000, "1" * 5000),
    "long": ("1" + " " * LONGEST_LITERAL, "1" + " " * LONGEST_LITERAL),
    "empty": ("", ""),
    "two lines": ("a\nb", "a\nb"),
    "zero byte": ("a\x00", "a\x00"),
}


@pytest.mark.parametrize("case", PARSED)
def test_values_of_the_command_line(case: str) -> None:
    text, value = PARSED[case]
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


REFUSED: dict[str, tuple[str, str]] = {
    "unknown": ("foo(3)", "1 problem\n  there is no 'foo'; text with parentheses needs quotes"),
    "unknown member": (
        "Objective.DP(beta=1)",
        "1 problem\n  there is no 'Objective.DP'; did you mean 'Objective.DPO'?",
    ),
    "family": (
        "Objective()",
        f"1 problem\n  Objective is a family; use one of its members: {members_hint(Objective)}",
    ),
    "import": (
        "__import__('os').system('true')",
        "1 problem\n  there is no '__import__('os').system'; text with parentheses needs quotes",
    ),
    "inside": (
        "Weights.HF(open('x').read())",
        "1 problem\n  there is no 'open('x').read'; text with parentheses needs quotes",
    ),
    "attribute inside": ("Weights.HF(a.b)", "1 problem\n  a.b is neither a literal nor a constructor call"),
    "dunder": (
        "Objective.DPO.__init__()",
        "1 problem\n  there is no 'Objective.DPO.__init__'; did you mean 'Objective.DPO'?",
    ),
    "stars": ("Weights.HF(*'ab')", "1 problem\n  * and ** are not understood in Weights.HF(...)"),
    "two stars": (
        "Objective.DPO(**{'beta': 1})",
        "1 problem\n  * and ** are not understood in Objective.DPO(...)",
    ),
    "twice": ("Objective.DPO(beta=1, beta=2)", "1 problem\n  Objective.DPO(...) is given beta twice"),
    "wrong field": (
        "Objective.DPO(bta=1)",
        "1 problem in Objective.DPO\n  bta: DPO has no field 'bta'; did you mean 'beta'?",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_are_refused(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        parse_value(text)
    assert str(caught.value) == message


def test_the_tree_decides_what_a_value_may_be(design: Any) -> None:
    assert evolve(design(), {"adapter.targets": parse_value("('mlp',)")}).adapter.targets == ("mlp",)
    with pytest.raises(SpecError, match=r"targets: expected tuple\[str, \.\.\.\], got \['mlp'\]; write \('mlp',\)"):
        evolve(design(), {"adapter.targets": parse_value("['mlp']")})
