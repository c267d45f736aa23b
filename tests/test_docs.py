"""docs/: commands print what the pages show, tables are those of the code, and every key of a plan is described.

`NNXDSL_UPDATE_DOCS=1 python -m pytest -n0 tests/test_docs.py` writes the shown output and the table of rules anew.
"""

from __future__ import annotations

import doctest
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, Experiment, Mesh, Model, Objective, Optimizer, Schedule, SpecError
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.planning.aot_process import compiled_report
from nnxdsl.planning.flops import Flops
from nnxdsl.planning.plan import plan
from nnxdsl.sharding import hardware
from nnxdsl.sharding.rules import DEFAULT_RULES
from nnxdsl.terminal.plan_format import format_axes
from nnxdsl.trainer.throughput import Speed
from tests.doc_pages import ROOT, UPDATE, check_page, texts

PAGE = ROOT / "docs" / "guides" / "plan.md"
PLAN_JSON = ROOT / "docs" / "reference" / "plan_json.md"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
WEIGHTS = ROOT / "docs" / "guides" / "weights.md"
MAPS = ("mesh", "across", "activations", "compiled.versions")
"""Objects whose keys are names of things: axes, policies, packages."""


@pytest.mark.extended
def test_commands_print_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(texts(PAGE, "console")) >= 5
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
    assert len(texts(WEIGHTS, "console")) >= 3
    check_page(WEIGHTS)


def test_the_page_on_adapters() -> None:
    actual = doctest.testfile(
        str(ROOT / "docs" / "guides" / "adapters.md"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert actual.attempted >= 5
    assert not actual.failed


def test_the_page_on_optimizers() -> None:
    page = str(ROOT / "docs" / "guides" / "optimizers.md")
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL  # of a message, the name alone: the whole is below
    actual = doctest.testfile(page, module_relative=False, optionflags=flags)
    assert actual.attempted > 8
    assert actual.failed == 0
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


def first_column(page: Path) -> list[str]:
    """The names in backticks of the first column of a page's tables."""
    rows = re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(.*?)`", row)]


def test_the_metrics_are_those_that_runs_write() -> None:
    actual = json.loads((ROOT / "tests" / "regression" / "training.json").read_text(encoding="utf-8"))
    recorded = {name for case in actual["cases"].values() for name in case["series"]}
    recorded = {re.sub(r"^(?:\w+: |eval/|evaluated )", "", name) for name in recorded}
    recorded = {re.sub(r"^rewards/\w+/(mean|std)$", r"rewards/NAME/\1", name) for name in recorded}
    recorded = {re.sub(r"^loss/\w+$", "loss/CLASS", name) for name in recorded}
    speed = Speed("pairs", rows=1, peak=1.0)
    recorded |= {*speed.rates(1, 1.0), "samples/s", *speed.use(Flops(1.0, 1.0), 1.0)}
    described = first_column(METRICS)
    assert sorted(described) == sorted(set(described))
    mixtures = {"mixture/NAME"}  # tests/trainer/test_mixture_run.py
    ratios = (f"importance_sampling_ratio/{name}" for name in ("mean", "raw_mean", "clip_mean"))
    differences = (f"sampling_logp_difference/{name}" for name in ("mean", "max"))
    sampling = {
        f"sampling/{name}" for name in (*ratios, *differences, "off_policy_mask_ratio", "staleness")
    }  # tests/rollouts
    entropy = {"policy_loss", "entropy_bonus", "entropy_coef"}  # tests/program/test_entropy.py
    others = {"cispo_clip_ratio", "vespo/phi_seq_mean"} | sampling | entropy  # tests/losses/test_policy_gradient.py
    others |= {"teacher_jsd/NAME", "teacher_token_frac/NAME"}  # tests/rollouts/test_served_teacher.py
    assert set(described) == recorded | mixtures | others | {"step", "attempt", "peak_memory_gib"}


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
    actual = plan(asked, "gpu", hardware.device("h200"))
    actual["compiled"] = compiled_report(asked, "cpu", 2, home=tmp_path)
    assert actual["warnings"]
    assert actual["compiled"]["collectives"]
    described = first_column(PLAN_JSON)
    assert sorted(described) == sorted(set(described))
    assert set(described) == set(keys(actual))


def test_generated_files_are_those_of_the_classes() -> None:
    for file, text in runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["GENERATED"].items():
        if UPDATE:
            file.write_text(text(), encoding="utf-8")
        assert file.read_text(encoding="utf-8") == text(), "run `python docs/make_configuration.py`"


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra `docs`")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    assert (tmp_path / "site" / "reference" / "configuration" / "index.html").is_file()
    assert 'href="first_dpo_run.ipynb"' in (tmp_path / "site/tutorials/first_dpo_run/index.html").read_text()
    assert (tmp_path / "site/tutorials/first_dpo_run/first_dpo_run.ipynb").is_file()
    copied = (tmp_path / "site/repository/benchmarks/index.html").read_text()
    assert 'href="../repository/benchmarks/#on-one-gpu"' in (tmp_path / "site/benchmarks/index.html").read_text()
    assert 'href="../../guides/memory/#compared-with-xla"' in copied


def test_pages_plot_with_nothing_that_no_extra_installs() -> None:
    """pandas plots with matplotlib, which nnxdsl does not install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert not any("matplotlib" in one for each in extras.values() for one in each)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = {page: "\n".join(texts(page, "python")) for page in pages}
    assert sum(".frame()" in text for text in code.values()) > 0
    assert [page.name for page, text in code.items() if re.search(r"\)\.plot\(|\bdf\.plot\b|matplotlib", text)] == []
