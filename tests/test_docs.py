"""docs/: commands print what the pages show, tables are those of the code, and every key of a plan is described.

`NNXDSL_UPDATE_DOCS=1 python -m pytest -n0 tests/test_docs.py` writes the shown output and the table of rules anew.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, Experiment, Mesh, Model, Objective, Optimizer, Schedule, SpecError, cli
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.planning.aot_process import compiled_report
from nnxdsl.planning.plan import plan
from nnxdsl.sharding import hardware
from nnxdsl.sharding.rules import DEFAULT_RULES
from nnxdsl.terminal.plan_format import format_axes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "plan.md"
WEIGHTS = ROOT / "docs" / "guides" / "weights.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
UPDATE = bool(os.environ.get("NNXDSL_UPDATE_DOCS"))
MAPS = ("mesh", "across", "activations", "compiled.versions")
"""Objects whose keys are names of things: axes, policies, packages."""


def printed(command: str) -> str:
    """What `nnxdsl ...` prints, its refusals too."""
    first, *words = shlex.split(command)
    assert first == "nnxdsl"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.main(words)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def checked(block: str) -> str:
    """A block with the output that its commands have; lines of `...` stand for any."""
    found = ""
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        out = printed(command.removeprefix("$ "))
        elided = re.search(r"^\.\.\.$", shown, re.MULTILINE)
        if not (UPDATE and not elided):
            same = doctest.OutputChecker().check_output(shown, out, doctest.ELLIPSIS)
            assert same, f"{command}\nshown:\n{shown}\nprinted:\n{out}"
        found += f"{command}\n{shown if elided else out}"
    return found


def check_page(page: Path) -> None:
    """Every command of a page prints what the page shows; in order, in this directory."""
    text = page.read_text(encoding="utf-8")
    changed = BLOCK.sub(lambda block: f"```console\n{checked(block[1])}```", text)
    if UPDATE:
        page.write_text(changed, encoding="utf-8")


def test_commands_print_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(BLOCK.findall(PAGE.read_text(encoding="utf-8"))) >= 5
    check_page(PAGE)


def test_the_page_on_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    original = ROOT / "tests" / "reference" / "llama3" / "untied"
    for name in ("model", "pickled", "escaping", "cut", "other"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_bytes((original / file).read_bytes())
    Path("pickled/model.safetensors").rename("pickled/pytorch_model.bin")
    Path("escaping/model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "../cut/x"}}')
    Path("cut/model.safetensors").write_bytes((original / "model.safetensors").read_bytes()[:-1000])
    config = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    assert len(BLOCK.findall(WEIGHTS.read_text(encoding="utf-8"))) >= 3
    check_page(WEIGHTS)


def test_the_page_on_adapters() -> None:
    found = doctest.testfile(
        str(ROOT / "docs" / "guides" / "adapters.md"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert found.attempted >= 5
    assert not found.failed


def test_the_page_on_optimizers() -> None:
    page = str(ROOT / "docs" / "guides" / "optimizers.md")
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL  # of a message, the name alone: the whole is below
    found = doctest.testfile(page, module_relative=False, optionflags=flags)
    assert found.attempted > 8
    assert found.failed == 0
    refused = re.search(r"^nnxdsl.errors.SpecError: (.*?)\n\n", Path(page).read_text(), re.DOTALL | re.MULTILINE)
    assert refused is not None
    with pytest.raises(SpecError) as caught:
        Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5), nu_dtype="bfloat16")
    assert refused[1] == str(caught.value)


def test_the_rules_are_the_rules() -> None:
    rows = [f"| {number} | `{logical}` | {format_axes(axes)} |" for number, (logical, axes) in enumerate(DEFAULT_RULES)]
    table = "\n".join(["| rule | logical axis | mesh axes |", "|---|---|---|", *rows]) + "\n"
    text = PAGE.read_text(encoding="utf-8")
    if UPDATE:
        text = re.sub(r"\| rule \| logical axis \|.*?\n(?!\|)", lambda _: table, text, flags=re.DOTALL)
        PAGE.write_text(text, encoding="utf-8")
    assert table in text
    for axis in MESH_AXES:
        assert f"| `{axis}` |" in text
    for device in hardware.DEVICES:
        assert f"`{device}`" in text


def keys(value: Any, path: str = "") -> Iterator[str]:
    """Every key of a JSON value as `arrays[].why[].rule`."""
    if isinstance(value, dict) and path not in MAPS:
        for name, inner in value.items():
            here = f"{path}.{name}" if path else name
            yield here
            yield from keys(inner, here)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from keys(item, f"{path}[]")


@pytest.mark.slow
def test_every_key_of_a_plan_is_described(tmp_path: Path) -> None:
    asked = Experiment(
        name="keys",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text("none.jsonl", max_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None),
        batch_size=2,
        steps=2,
        mesh=Mesh(fsdp=2, rules=(("experts", "expert"),)),
    )
    found = plan(asked, "gpu", hardware.device("h200"))
    found["compiled"] = compiled_report(asked, "cpu", 2, home=tmp_path)
    assert found["warnings"]
    assert found["compiled"]["collectives"]
    section = PAGE.read_text(encoding="utf-8").partition("## The JSON form")[2].partition("\n## ")[0]
    described = [
        key for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for key in re.findall(r"`(.*?)`", row)
    ]
    assert sorted(described) == sorted(set(described))
    assert set(described) == set(keys(found))


def test_the_configuration_is_that_of_the_classes() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    if UPDATE:
        script["PAGE"].write_text(script["page"](), encoding="utf-8")
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run `python docs/make_configuration.py`"


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra `docs`")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    assert (tmp_path / "site" / "reference" / "configuration" / "index.html").is_file()
