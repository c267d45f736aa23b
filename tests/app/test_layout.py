"""Layouts without a browser: what a URL asks for, and the plan of a small model as tables and drawings."""

from __future__ import annotations

import csv
import io
import json
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.pages.layout import arrays as layout_arrays
from app.pages.layout import request as layout_request
from app.pages.layout.request import mesh_of, plan_job, rules_of, rules_text, with_placement
from app.settings import Settings
from app.state import Site
from nnxdsl import Mesh, Model, RunError, SpecError
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import evolve
from nnxdsl.errors import NnxdslError
from nnxdsl.planning.plan import describe
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.terminal.array_view import blocks
from tests.app.forged import SECRET, Outside
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL

gr = pytest.importorskip("gradio")
layout_page = pytest.importorskip("app.pages.layout.page")
layout_report = pytest.importorskip("app.pages.layout.report")
plan_texts = pytest.importorskip("app.pages.layout.plan_texts")
native = pytest.importorskip("tests.app.native")
from app.components.device_grid import MOST, cells, chosen, drawing  # noqa: E402 - needs gradio

MESH = {"data": 1, "fsdp": 4, "tensor": 2}


MEMORY = (
    ("frozen weights", 312_320, "exact", "every array of the layout"),
    ("trainable weights", 380_928, "exact", "float32"),
    ("activations", 96_130_052, "estimated", "what each layer keeps for the backward pass, traced"),
    ("workspace", 0, "estimated", "the largest of what lives for a moment"),
)
DEVICE = {"name": "h200", "description": "NVIDIA H200", "memory": 150_109_106_995, "usable": 147_961_623_347}


@pytest.fixture(scope="module")
def example_plan() -> dict[str, Any]:
    """A plan as `nnxdsl plan --json` prints it: its layout is a real one; the figures of memory were noted down."""
    made = evolve(experiment(0), {f"mesh.{axis}": count for axis, count in MESH.items()})
    layout = json.loads(json.dumps(describe(build_blueprint(made, "gpu").layout)))
    parts = [
        {"name": name, "bytes": count, "tag": tag, "formula": mode, "memory": "device"}
        for name, count, tag, mode in MEMORY
    ]
    figures = {
        "id": made.id, "steps": 60, "batch_size": 16, "rows": 960, "tokens_at_most": 368_640, "microbatches": 1,
        "parameters": {"total": 1_224_192, "trainable": 233_472}, "compute": "bfloat16", "platform": "gpu",
        "reference": "none", "attention": "dense", "memory": parts, "activations": {"none": 96_130_052},
        "bytes_per_device": sum(part["bytes"] for part in parts), "host_bytes_per_device": 0, "remat": "none",
        "remat_why": "fits", "device": DEVICE, "step_seconds": None, "warnings": [], "flows": [], "compiled": None,
        "verdict": {"fits": True, "share": 0.0007, "message": "fits: 0.1 of 132.8 GiB, 132.7 GiB free"},
    }  # fmt: skip
    return {**layout, **figures}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


def test_meshes_are_read() -> None:
    sizes = mesh_of("fsdp:16, tp=8", 1_000)
    assert {axis: size for axis, size in sizes.items() if size > 1} == {"fsdp": 16, "tensor": 8}
    assert mesh_of("tensor:8,fsdp:16", 1_000) == sizes
    assert mesh_of("", 1) == mesh_of("data:1", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp:8", "there is no axis 'fdsp'; did you mean 'fsdp'?"),
        ("fsdp:8,fsdp:2", "is given more than once"),
        ("fsdp:0", "expected a number from 1 to 1,000"),
        ("fsdp:-1", "expected a number"),
        ("fsdp", "expected a number"),
        ("fsdp:²", "expected a number"),
        ("fsdp:99999999999999999999", "expected a number"),
        ("fsdp:100,tensor:100", "10,000 devices; expected at most 1,000"),
    ],
)
def test_what_is_wrong_with_a_mesh_is_said(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        mesh_of(text, 1_000)
    assert message in str(caught.value)


def test_rules_are_read_and_written() -> None:
    rules = (("embed", "fsdp"), ("mlp", ("tensor", "context")), ("vocab", None))
    assert rules_of(rules_text(rules)) == rules
    made = with_placement(experiment(0), {"rules": rules_text(rules)}, "fsdp:2", 8)
    assert (made.mesh.rules, made.mesh.fsdp) == (rules, 2)
    for wrong in ("embed", "embed:", ": fsdp", "embed: nowhere"):
        with pytest.raises(SpecError):
            with_placement(experiment(0), {"rules": wrong}, "", 8)


def test_an_experiment_keeps_its_mesh_where_the_url_names_none() -> None:
    made = experiment(0, mesh=Mesh(fsdp=4, tensor=2))
    assert with_placement(made, {}, "", 8) is made
    assert with_placement(made, {}, "data:2", 8).mesh == Mesh(data=2)
    with pytest.raises(SpecError, match="8 devices; expected at most 4"):
        with_placement(made, {}, "", 4)


def test_the_drawing_agrees_with_that_of_the_terminal(example_plan: dict[str, Any]) -> None:
    mesh = example_plan["mesh"]
    for array in example_plan["arrays"]:
        rendered = list(cells(array, mesh, chosen(array, mesh)))
        held = blocks(array["shape"], array["spec"], mesh).reshape(-1)
        assert [cell.block for cell in rendered] == held.tolist()
        assert [cell.number for cell in rendered] == list(range(8))
        whole = np.zeros(array["shape"], dtype=int)
        for cell in rendered:
            whole[tuple(slice(*part) for part in cell.held)] += 1
        assert (whole == array["replicas"]).all()


def test_of_a_large_mesh_one_group_of_replicas_is_drawn() -> None:
    mesh = {"data": 64, "fsdp": 16, "tensor": 8}
    array = {
        "shape": [320, 128], "device_shape": [40, 8], "spec": ["tensor", "fsdp"], "axes": ["vocab", "embed"],
        "replicas": 64, "device_bytes": 640,
    }  # fmt: skip
    rendered = list(cells(array, mesh, chosen(array, mesh)))
    assert sorted(cell.block for cell in rendered) == list(range(128))
    html = drawing(array, mesh)
    assert html.count("<button") == 128
    assert "8,064 of 8,192 devices are not drawn and hold copies of the same blocks" in html
    huge = {**array, "shape": [10**6, 10**6], "device_shape": [10**6 // 64, 10**3], "spec": ["data", "fsdp"]}
    assert len(list(cells(huge, mesh, chosen(huge, {**mesh, "fsdp": 1_000})))) <= MOST


def test_every_array_is_in_the_table_with_its_rules(example_plan: dict[str, Any]) -> None:
    caption, table = layout_arrays.table(example_plan, None, {})
    assert f"{len(example_plan['arrays'])} of {len(example_plan['arrays'])} arrays in {len(table)} rows" in caption
    assert table["arrays"].sum() == len(example_plan["arrays"])
    assert {array["path"] for array in example_plan["arrays"]} | {
        array["group"] for array in example_plan["arrays"]
    } >= set(table["array"])
    embedding = table.set_index("array").loc["embed.embedding"]
    assert "embed→fsdp #" in embedding["rules"]
    assert embedding["partition"] == "tensor, fsdp"
    array = next(array for array in example_plan["arrays"] if array["path"] == "embed.embedding")
    tried = layout_arrays.why(array)
    assert tried["outcome"].tolist() == ["✔ taken", "✔ taken", "not reached"]
    assert "its axes were free" in tried["why"].tolist()
    for number in range(len(table)):
        chosen_array = layout_arrays.array_of_row(example_plan, {}, number)
        assert chosen_array is not None
        assert table["array"][number] in (chosen_array["path"], chosen_array["group"])
    assert layout_arrays.array_of_row(example_plan, {}, len(table)) is None


def test_the_table_compares_two_meshes(example_plan: dict[str, Any]) -> None:
    other = [{**array, "spec": [None] * len(array["shape"])} for array in example_plan["arrays"][1:]]
    _, table = layout_arrays.table(example_plan, {**example_plan, "arrays": other}, {})
    rows = table.set_index("array")["second partition"]
    assert rows["embed.embedding"] == "none"
    assert "-, -, - ≠" in rows.tolist()


def test_arrays_are_filtered_and_sorted(example_plan: dict[str, Any]) -> None:
    arrays = example_plan["arrays"]
    kept = layout_arrays.filtered(arrays, {"q": "attention TENSOR", "part": "frozen"})
    assert kept
    assert all("attention" in array["path"] and array["part"] == "frozen" for array in kept)
    assert layout_arrays.filtered(arrays, {"q": "no such array"}) == []
    assert layout_arrays.table(example_plan, None, {"q": "no such array"})[1].empty
    copies = [array["replicas"] for array in layout_arrays.filtered(arrays, {"sort": "copies"})]
    assert copies == sorted(copies, reverse=True)
    by_size = layout_arrays.folded(layout_arrays.filtered(arrays, {"sort": "device"}))
    sizes = [sum(array["device_bytes"] for array in kind) for kind in by_size]
    assert sizes == sorted(sizes, reverse=True)


def test_the_csv_has_every_array_and_no_formulas(example_plan: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(layout_arrays.to_csv(example_plan["arrays"]))))
    assert sum(int(row["device_bytes"]) for row in rows) == sum(
        array["device_bytes"] for array in example_plan["arrays"]
    )
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    assert layout_arrays.guarded("=1+1") == "'=1+1"


def test_the_memory_adds_up(example_plan: dict[str, Any]) -> None:
    table = layout_report.memory_parts([example_plan]).set_index("part")
    for part in example_plan["memory"]:
        assert part["bytes"] == 0 or table.loc[part["name"], "formula"] == part["formula"]
    assert table.loc["activations", "basis"] == "estimated"
    bars = layout_report.memory_bars([example_plan, {**example_plan, "mesh": {"data": 2}}])
    mib = example_plan["bytes_per_device"] / 2**20
    assert sum(trace.x[0] for trace in bars.data) == pytest.approx(mib)
    assert sum(trace.x[1] for trace in bars.data) == pytest.approx(mib)
    assert bars.layout.xaxis.range[1] < 1.1 * mib  # a device of 138 GiB would make the parts too small
    assert list(bars.layout.yaxis.ticktext) == ["fsdp=4<br>tensor=2", "data=2"]
    full = layout_report.memory_bars([{**example_plan, "device": {**DEVICE, "memory": 2**27, "usable": 1.2 * 2**26}}])
    assert full.layout.xaxis.range[1] > 128
    assert full.layout.shapes[0].x0 == pytest.approx(1.2 * 64)


def test_parts_of_host_memory_and_of_one_mesh(example_plan: dict[str, Any]) -> None:
    host = {"name": "optimizer", "bytes": 2**20, "tag": "exact", "formula": "offloaded", "memory": "host"}
    first = {**example_plan, "memory": [*example_plan["memory"], host], "host_bytes_per_device": 2**21}
    table = layout_report.memory_parts([first, example_plan]).set_index("part")
    assert table.loc["optimizer (host's memory)", ["memory", "second mesh"]].tolist() == ["1 MiB, 50%", "-"]


@pytest.mark.parametrize(
    ("share", "remedy", "sign", "message"),
    [
        (0.5, "", "✔", ""),
        (0.989, "", "⚠", "That is tight"),
        (1.2, "; --search may find a mesh on which it fits", "✘", "nnxdsl plan FILE --device NAME --count N --search"),
        (1.2, "; with memory.remat=full microbatch_size=2 it would take 9 GiB", "✘", "With memory.remat=full"),
    ],
)
def test_a_plan_is_green_only_with_room_to_spare(
    example_plan: dict[str, Any], share: float, remedy: str, sign: str, message: str
) -> None:
    verdict = {"fits": share <= 1, "share": share, "message": f"fits or not: 1 of 2 GiB{remedy}"}
    text = plan_texts.summary({**example_plan, "verdict": verdict})
    assert f"**{sign} " in text
    assert message in text.replace("\\_", "_")
    assert " --search may" not in text
    assert ("✔" in text) == (sign == "✔")
    assert "memory is unknown" in plan_texts.summary({**example_plan, "device": None, "verdict": None})
    recomputed = plan_texts.summary(
        {**example_plan, "verdict": verdict, "remat": "dots", "remat_why": "first that fits"}
    )
    assert ("recomputed in part to fit: memory.remat=dots" in recomputed) == (share <= 1)
    assert "recomputed" not in text


def test_facts_rules_and_activations_of_two_plans(example_plan: dict[str, Any]) -> None:
    flow = {"axes": ["batch", None], "shape": [4, 8], "spec": ["fsdp", None], "device_shape": [1, 8]}
    first = {**example_plan, "flows": [flow]}
    second = {
        **example_plan,
        "flows": [{**flow, "spec": [None, None], "device_shape": [4, 8]}],
        "rules": [["batch", "data"]],
    }
    facts = plan_texts.facts([first, second]).set_index("fact")
    assert facts.loc["mesh", "value"] == "fsdp=4 x tensor=2 (8 devices)"
    assert facts.loc["policy", "value"] == "none: fits"
    assert list(plan_texts.rules([first, first])) == ["rule", "logical axis", "mesh axes"]
    assert plan_texts.rules([first])["rule"].tolist() == [f"#{n}" for n in range(len(example_plan["rules"]))]
    assert len(plan_texts.rules([first, second])) == len(example_plan["rules"]) + 1
    row = plan_texts.activations([first, second]).iloc[0]
    assert (row["partition"], row["partition, second mesh"]) == ("fsdp, -", "-, -")


REPORT = {
    "problem": None, "memory": {"arguments": 10, "outputs": 5, "aliased": 5, "temporaries": 90, "allocated": 100},
    "usable": 1_000, "lower_seconds": 1.0, "compile_seconds": None, "versions": {"jax": "0"}, "cached": True,
    "count": 2, "device": "cpu", "topology": "", "flows": [],
    "collectives": [{"kind": "all-gather", "group": 2, "in_loop": True, "conditional": True, "count": 3, "bytes": 64}],
}  # fmt: skip


def test_the_report_of_the_compiler(example_plan: dict[str, Any]) -> None:
    text = plan_texts.compiled({**example_plan, "compiled": REPORT, "bytes_per_device": 110})
    assert "✔ it fits: XLA needs 100 B of 1000 B usable; the plan estimates 110 B, +10.0%" in text.replace(
        "0.9766 KiB", "1000 B"
    )
    assert "compiled in an unknown time (cached report)" in text
    assert "✘ it does not fit" in plan_texts.compiled({**example_plan, "compiled": {**REPORT, "usable": 99}})
    assert "⚠ it fits, with little room" in plan_texts.compiled({**example_plan, "compiled": {**REPORT, "usable": 101}})
    figures, collectives, _ = plan_texts.compiled_tables({**example_plan, "compiled": REPORT})
    assert figures["figure"].tolist() == list(REPORT["memory"])
    assert collectives.iloc[0].tolist() == ["all-gather", 2, "in a loop in a branch: at most", "3", "64 B"]
    assert "No collectives." in plan_texts.compiled({**example_plan, "compiled": {**REPORT, "collectives": []}})
    assert "✘ out of luck" in plan_texts.compiled({**example_plan, "compiled": {**REPORT, "problem": "out of luck"}})


def test_what_a_plan_says_is_shown_as_it_is(example_plan: dict[str, Any]) -> None:
    evil = {**example_plan["arrays"][0], "path": EVIL, "group": EVIL, "dtype": EVIL, "axes": [EVIL, EVIL]}
    part = {"name": EVIL, "bytes": 1, "tag": EVIL, "formula": EVIL, "memory": "device"}
    plan = {
        **example_plan,
        "arrays": [evil],
        "warnings": [{"kind": EVIL, "path": EVIL, "message": EVIL}],
        "memory": [part],
    }
    text = plan_texts.summary(plan)
    assert "! " in text
    assert drawing(evil, MESH).count("&lt;img") == 2
    for shown in (text, drawing(evil, MESH), layout_report.memory_bars([plan]).to_json()):
        assert "<img" not in shown


# The page


def shown(site: Site, **query: str) -> dict[str, Any]:
    return native.Built(layout_page.Layout, site).shown(**query)


def test_the_page_before_anything_is_planned(site: Site) -> None:
    values = shown(site)
    assert "There is no recipe in" in values["Markdown"]
    assert "Start with the demo" in values["Markdown"]
    for query in ({"run": EVIL}, {"exp": EVIL}, {"draft": EVIL}, {"model": EVIL}, {"model": "/etc"}):
        values = shown(site, **query)
        assert values["Textbox 2"]  # the problem
        assert "<img" not in values["Markdown"]
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    assert run in shown(site)["Markdown"].replace("\\_", "_")
    for wrong in (
        {"mesh": EVIL}, {"mesh": "fsdp:0"}, {"mesh2": "x:1"}, {"rules": EVIL}, {"mesh": "data:9999999"},
        {"device": "h2000"}, {"device": "h100:0"}, {"device": "h100", "memory": "x"},
    ):  # fmt: skip
        values = shown(site, run=run, **wrong)
        assert values["Textbox 2"], wrong
        assert values["Experiment"] == f"run:{run}"
    assert not list(site.settings.app_directory.glob("plans/*"))


def test_only_experiments_of_the_home_are_reached(tmp_path: Path) -> None:
    outside = Outside.under(tmp_path)
    site = Site(Settings(home=outside.home, project=tmp_path, read_only=True))
    before = outside.snapshot()

    def answer(kind: str, name: str) -> str:
        try:
            return repr(layout_request.source(site, {kind: name}))
        except NnxdslError as error:
            return str(error)

    try:
        for kind in layout_request.SOURCES:
            for name in outside.hostile():
                assert SECRET not in answer(kind, name)
        for other, nowhere in outside.ids():
            assert answer("run", other).replace(other, "") == answer("run", nowhere).replace(nowhere, "")
        assert layout_request.source(site, {"run": outside.inside}).experiment == experiment(0)
        assert outside.snapshot() == before
    finally:
        site.close()


def test_the_query_fills_the_controls(site: Site) -> None:
    text = "*.mlp.down.kernel | mlp: tensor+fsdp, embed: -\nembed | vocab: fsdp"
    rules = layout_request.array_rules_of(text)
    assert rules == (
        ("*.mlp.down.kernel", (("mlp", ("tensor", "fsdp")), ("embed", None))),
        ("embed", (("vocab", "fsdp"),)),
    )
    assert layout_request.array_rules_text(rules) == text
    for wrong in ("mlp: tensor", "x |", "| a: b", "x | a b"):
        with pytest.raises(SpecError, match="line 1"):
            layout_request.array_rules_of(wrong)
    made = experiment(0, mesh=Mesh(fsdp=2, rules=(("embed", "fsdp"),)))
    run = write_run(site.settings.home, made, "finished", 3).name
    query = {"run": run, "device": "h100", "memory": "48", "arrays": text, "rules": "none"}
    mesh = with_placement(made, query, "fsdp:2", 8).mesh
    assert (mesh.array_rules, mesh.rules) == (rules, ())
    assert layout_request.device_of(query) == layout_request.device_of({"device": "h100:48"}) == "h100:48"
    values = shown(site, mesh="fsdp:2", mesh2="x:1", **query)
    assert [values[name] for name in ("Device", "Memory per device (GiB)", "Mesh", "Compare with mesh")] == [
        "h100", "48", "fsdp:2", "x:1",
    ]  # fmt: skip
    assert (values["Textbox"], values["Textbox 1"]) == ("", text)
    assert shown(site, run=run, mesh2="x:1")["Textbox"] == "embed: fsdp"


def test_rules_go_into_the_query_unless_they_are_the_experiments_own(site: Site) -> None:
    run = write_run(site.settings.home, experiment(0, mesh=Mesh(rules=(("embed", "fsdp"),))), "finished", 3).name
    built = native.Built(layout_page.Layout, site)

    def apply(query: dict[str, str], *texts: str) -> dict[str, str]:
        return built.pressed("Apply rules", query, *texts)["query"]

    assert apply({"run": run}, "embed: fsdp", "") == {"rules": "", "arrays": ""}
    assert apply({"run": run}, "", "* | mlp: -") == {"rules": "none", "arrays": "* | mlp: -"}
    for wrong in (("embed", ""), ("", "mlp: tensor")):
        with pytest.raises(gr.Error, match="line 1"):
            apply({"run": run}, *wrong)
    with pytest.raises(gr.Error, match="Choose an experiment first"):
        apply({}, "embed: fsdp", "")


def test_pasted_text_becomes_a_draft_where_the_app_may_write(site: Site, tmp_path: Path) -> None:
    assert "Show its layout" not in native.Built(layout_page.Layout, site).buttons
    writer = Site(Settings(home=tmp_path / "writer", project=tmp_path))
    built = native.Built(layout_page.Layout, writer)
    try:
        query = built.pressed("Show its layout", {"run": "x"}, to_python(experiment(3)))["query"]
        assert query["run"] == ""
        assert layout_request.source(writer, query).experiment == experiment(3)
        with pytest.raises(gr.Error):
            built.pressed("Show its layout", {}, "import os")
    finally:
        writer.close()


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def test_a_model_of_the_project_replaces_that_of_the_experiment(site: Site) -> None:
    place = site.settings.project / "models" / "llama"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(LLAMA))
    assert layout_request.models_in(site.settings.project) == ["models/llama"]
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    for text in ("models/llama", "models/llama/config.json"):
        actual = layout_request.source(site, {"run": run, "model": text}).experiment
        assert actual is not None
        assert actual.model == Model.HF(str(place))
        assert actual.objective == experiment(0).objective
    alone = layout_request.source(site, {"model": "models/llama"}).experiment
    assert alone is not None
    assert alone.model == Model.HF(str(place))
    outside = site.settings.project.parent / "outside"
    (site.settings.project / "linked").symlink_to(outside, target_is_directory=True)
    outside.mkdir(exist_ok=True)
    (outside / "config.json").write_text(json.dumps(LLAMA))
    for wrong in ("models", "..", str(outside), "linked", "a\0b"):
        with pytest.raises(RunError, match=r"outside of the project|has no config\.json|cannot be read"):
            layout_request.model_path(site.settings, wrong)


def test_a_plan_is_worked_out_by_a_child_and_not_again_after_it_was_cancelled(site: Site) -> None:
    made = experiment(0)
    run = write_run(site.settings.home, made, "finished", 3).name
    built, query = native.Built(layout_page.Layout, site), {"run": run, "mesh": "fsdp:2"}
    assert "so far ..." in built.shown(**query)["Markdown 1"]
    job = plan_job(site, with_placement(made, query, "fsdp:2", 8), "h200", start=False)
    assert job is not None
    assert job.argv[1:4] == ("-m", "nnxdsl", "plan")
    assert not job.is_over
    built.pressed("Cancel", query)
    assert job.state == "cancelled"
    for _ in range(2):
        assert "was cancelled" in built.shown(**query)["Markdown 1"]
    built.pressed("Try again", query)
    restarted = plan_job(site, with_placement(made, query, "fsdp:2", 8), "h200", start=False)
    assert restarted is not None
    assert not restarted.is_over


@pytest.mark.extended
def test_a_plan_is_shown_with_its_arrays(site: Site) -> None:
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    built, query = native.Built(layout_page.Layout, site), {"run": run, "mesh": "fsdp:2", "device": "h100"}
    built.shown(**query)
    job = plan_job(site, with_placement(experiment(0), query, "fsdp:2", 8), "h100", start=False)
    assert job is not None
    while not job.is_over:
        time.sleep(0.2)
    assert job.state == "done", job.error
    values = built.shown(**query)
    assert "✔ fits" in values["Markdown 1"]
    assert values["Plot"].data
    arrays = values["Dataframe 7"]
    assert arrays["arrays"].sum() == len(job.result["arrays"])
    assert values["HTML"].count("<button") == 2
    number = arrays["array"].tolist().index("embed.embedding")
    select = built.handler("select").fn
    picked = gr.SelectData(None, {"index": [number, 0], "value": number, "row_value": arrays.iloc[number].tolist()})
    address = "?" + urllib.parse.urlencode(query)
    chosen_array = json.loads(select(gr.Request(client=None), picked, address))["query"]["array"]
    assert chosen_array == "frozen:embed.embedding"
    selected = built.shown(**query, array=chosen_array)
    titles = [value for name, value in selected.items() if name.startswith("Markdown")]
    assert any("embed.embedding (frozen)" in str(title) for title in titles)
    assert selected["Dataframe 8"]["logical axis"].tolist()[:2] == ["vocab", "embed"]
    assert built.shown(**query, q="no such array")["Dataframe 7"].empty
    name, text = layout_request.arrays_csv(site, {**query, "q": "embedding"}) or ("", "")
    assert name.endswith("-layout.csv")
    assert "embed.embedding" in text
    assert layout_request.arrays_csv(site, {**query, "mesh": "data:2"}) is None
