"""Layouts without a browser: what a URL asks for, and the plan of a small model as tables and drawings."""

from __future__ import annotations

import csv
import io
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.page import Ask
from app.pages.layout import arrays as layout_arrays
from app.pages.layout import page as layout_page
from app.pages.layout import request as layout_request
from app.pages.layout import views as layout_views
from app.pages.layout.grid import MOST, cells, chosen, drawing
from app.pages.layout.plan_words import plan_words
from app.pages.layout.request import mesh_of, mesh_text, plan_job, rules_of, rules_text, with_placement
from app.settings import Settings
from app.state import Site
from nnxdsl import Mesh, SpecError
from nnxdsl.config.core.serialization import evolve
from nnxdsl.planning.plan import describe
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.terminal.array_view import blocks
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL

MESH = {"data": 1, "fsdp": 4, "tensor": 2}


MEMORY = (
    ("frozen weights", 312_320, "exact", "every array of the layout"),
    ("trainable weights", 380_928, "exact", "float32"),
    ("activations", 96_130_052, "estimated", "what each layer keeps for the backward pass, traced"),
    ("workspace", 0, "estimated", "the largest of what lives for a moment"),
)
DEVICE = {"name": "h200", "description": "NVIDIA H200", "memory": 150_109_106_995, "usable": 147_961_623_347}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A plan as `nnxdsl plan --json` prints it: its layout is a real one; the figures of memory were noted down."""
    made = evolve(experiment(0), {f"mesh.{axis}": count for axis, count in MESH.items()})
    layout = json.loads(json.dumps(describe(build_blueprint(made, "gpu").layout)))
    parts = [
        {"name": name, "bytes": count, "tag": tag, "how": how, "memory": "device"} for name, count, tag, how in MEMORY
    ]
    figures = {
        "id": made.id, "steps": 60, "batch_size": 16, "rows": 960, "tokens_at_most": 368_640, "microbatches": 1,
        "parameters": {"total": 1_224_192, "trainable": 233_472}, "compute": "bfloat16", "platform": "gpu",
        "reference": "none", "attention": "dense", "memory": parts, "activations": {"none": 96_130_052},
        "bytes_per_device": sum(part["bytes"] for part in parts), "host_bytes_per_device": 0, "remat": "none",
        "remat_why": "fits", "device": DEVICE, "step_seconds": None, "warnings": [], "flows": [], "compiled": None,
        "verdict": {"fits": True, "share": 0.0007, "message": "fits: 0.1 of 137.8 GiB, 137.7 GiB free"},
    }  # fmt: skip
    return {**layout, **figures}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


def test_meshes_are_read_and_written() -> None:
    sizes = mesh_of("fsdp:16, tp=8", 1_000)
    assert {axis: size for axis, size in sizes.items() if size > 1} == {"fsdp": 16, "tensor": 8}
    assert mesh_of(mesh_text(sizes), 1_000) == sizes
    assert mesh_of(mesh_text(mesh_of("", 1)), 1) == mesh_of("data:1", 1)


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


def test_the_drawing_agrees_with_that_of_the_terminal(found: dict[str, Any]) -> None:
    mesh = found["mesh"]
    for array in found["arrays"]:
        drawn = list(cells(array, mesh, chosen(array, mesh)))
        held = blocks(array["shape"], array["spec"], mesh).reshape(-1)
        assert [cell.block for cell in drawn] == held.tolist()
        assert [cell.number for cell in drawn] == list(range(8))
        whole = np.zeros(array["shape"], dtype=int)
        for cell in drawn:
            whole[tuple(slice(*part) for part in cell.held)] += 1
        assert (whole == array["replicas"]).all()


def test_of_a_large_mesh_one_group_of_replicas_is_drawn() -> None:
    mesh = {"data": 64, "fsdp": 16, "tensor": 8}
    array = {
        "shape": [320, 128], "device_shape": [40, 8], "spec": ["tensor", "fsdp"], "axes": ["vocab", "embed"],
        "replicas": 64, "device_bytes": 640,
    }  # fmt: skip
    drawn = list(cells(array, mesh, chosen(array, mesh)))
    assert sorted(cell.block for cell in drawn) == list(range(128))
    html = drawing(array, {"mesh": mesh})
    assert html.count("<button") == 128
    assert "8,064 of 8,192 devices are not drawn and hold copies of the same blocks" in html
    huge = {**array, "shape": [10**6, 10**6], "device_shape": [10**6 // 64, 10**3], "spec": ["data", "fsdp"]}
    assert len(list(cells(huge, mesh, chosen(huge, {**mesh, "fsdp": 1_000})))) <= MOST


def test_every_array_is_in_the_table_with_its_rules(found: dict[str, Any]) -> None:
    html = layout_arrays.table(found, None, {"all": "1"}, None)
    for array in found["arrays"]:
        assert f">{array['path']}<" in html or f">{array['group']}<" in html
    assert "embed→fsdp #" in html
    assert "not reached" in html
    assert sum(len(kind) for kind in layout_arrays.folded(found["arrays"])) == len(found["arrays"])


def test_arrays_are_filtered_and_sorted(found: dict[str, Any]) -> None:
    arrays = found["arrays"]
    kept = layout_arrays.filtered(arrays, {"q": "attention TENSOR", "part": "frozen"})
    assert kept
    assert all("attention" in array["path"] and array["part"] == "frozen" for array in kept)
    assert layout_arrays.filtered(arrays, {"q": "no such array"}) == []
    copies = [array["replicas"] for array in layout_arrays.filtered(arrays, {"sort": "copies"})]
    assert copies == sorted(copies, reverse=True)
    by_size = layout_arrays.folded(layout_arrays.filtered(arrays, {"sort": "device"}))
    sizes = [sum(array["device_bytes"] for array in kind) for kind in by_size]
    assert sizes == sorted(sizes, reverse=True)


def test_the_csv_has_every_array_and_no_formulas(found: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(layout_arrays.to_csv(found["arrays"]))))
    assert sum(int(row["device_bytes"]) for row in rows) == sum(array["device_bytes"] for array in found["arrays"])
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    assert layout_arrays.guarded("=1+1") == "'=1+1"


def test_the_memory_adds_up(found: dict[str, Any]) -> None:
    html = layout_views.summary(found, "a")
    for part in found["memory"]:
        assert part["bytes"] == 0 or (part["name"] in html and part["how"].replace("'", "&#x27;") in html)
    assert "✔ fits" in html
    widths = [float(text.split("%")[0]) for text in html.split("width:")[1:]]
    assert abs(sum(widths) - 200) < 0.1  # the bar of the device, and the same parts drawn larger
    over = {**found, "verdict": {"fits": False, "share": 1.5, "message": "does not fit"}}
    assert "✘ does not fit" in layout_views.summary(over, "a")
    assert "memory is unknown" in layout_views.summary({**found, "device": None, "verdict": None}, "a")


@pytest.mark.parametrize(
    ("share", "remedy", "sign", "words"),
    [
        (0.5, "", "✔", ""),
        (0.989, "", "⚠", "That is tight"),
        (1.2, "; --search may find a mesh on which it fits", "✘", "nnxdsl plan FILE --device NAME --count N --search"),
        (1.2, "; with memory.remat=full microbatch_size=2 it would take 9 GiB", "✘", "With memory.remat=full"),
    ],
)
def test_a_plan_is_green_only_with_room_to_spare(
    found: dict[str, Any], share: float, remedy: str, sign: str, words: str
) -> None:
    verdict = {"fits": share <= 1, "share": share, "message": f"fits or not: 1 of 2 GiB{remedy}"}
    for html in (layout_views.summary({**found, "verdict": verdict}, "a"), plan_words({**found, "verdict": verdict})):
        notice = html[html.index('class="notice verdict') :].partition("</p>")[0]
        assert f"<b>{sign} " in notice
        assert words in notice
        assert ("verdict fits" in notice) == (sign == "✔")
        assert ">--search" not in notice
        assert " --search may" not in notice
        assert ("✔" in html) == (sign == "✔")


def test_what_a_plan_says_is_escaped(found: dict[str, Any]) -> None:
    evil = {**found["arrays"][0], "path": EVIL, "group": EVIL, "dtype": EVIL, "axes": [EVIL, EVIL]}
    plan_ = {**found, "arrays": [evil], "warnings": [{"kind": EVIL, "path": EVIL, "message": EVIL}]}
    pieces = [
        layout_arrays.table(plan_, plan_, {"q": ""}, evil),
        layout_views.summary(plan_, "a"),
        drawing(evil, plan_),
    ]
    for html in pieces:
        assert "<img" not in html


def test_the_page_before_anything_is_planned(site: Site) -> None:
    choice = layout_page.opened(site, Ask({})).regions
    assert "Recipes" in choice["choose"]
    for query in ({"run": EVIL}, {"exp": EVIL}, {"draft": EVIL}):
        html = layout_page.opened(site, Ask(query)).regions["choose"]
        assert "<img" not in html
        assert 'role="alert"' in html
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    for wrong in ({"mesh": EVIL}, {"mesh": "fsdp:0"}, {"mesh2": "x:1"}, {"rules": EVIL}, {"mesh": "data:9999999"}):
        regions = layout_page.opened(site, Ask({"run": run, **wrong})).regions
        assert "<img" not in "".join(regions.values())
        assert "notice bad" in regions["result"]
    assert "notice bad" in layout_page.opened(site, Ask({"run": run, "device": "h2000"})).regions["choose"]


def test_the_fields_go_into_the_url(site: Site) -> None:
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    fields = {"of": f"run:{run}", "size-fsdp": "4", "size-tensor": "2", "device": "v5e", "mesh2": "fsdp=8"}
    answer = layout_page.choose(site, Ask({"exp": "other", "q": "x"}, {"fields": fields}))
    query = dict(urllib.parse.parse_qsl((answer.goto or "").partition("?")[2]))
    assert query == {"run": run, "mesh": "fsdp:4,tensor:2", "mesh2": "fsdp:8", "device": "v5e", "q": "x"}
    with pytest.raises(SpecError):
        layout_page.choose(site, Ask({}, {"fields": {**fields, "size-fsdp": "0"}}))


def test_rules_of_arrays_are_lines_and_a_device_may_have_another_memory(site: Site) -> None:
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
    run = write_run(site.settings.home, experiment(0), "finished", 3).name
    fields = {
        "of": f"run:{run}",
        "device": "h100",
        "memory": "48",
        "arrays": text,
        "rules": "",
        "rules-were": "a: fsdp",
    }
    answer = layout_page.choose(site, Ask({}, {"fields": fields}))
    query = dict(urllib.parse.parse_qsl((answer.goto or "").partition("?")[2]))
    assert query == {"run": run, "mesh": "data:1", "device": "h100:48", "arrays": text, "rules": "none"}
    mesh = with_placement(experiment(0), query, "fsdp:2", 8).mesh
    assert (mesh.array_rules, mesh.rules) == (rules, ())
    html = layout_page.opened(site, Ask(query)).regions["choose"]
    assert 'value="48"' in html
    assert "vocab: fsdp</textarea>" in html
    assert "notice bad" in layout_page.opened(site, Ask({"run": run, "device": "h100:1"})).regions["choose"]


def test_a_plan_is_worked_out_by_a_child_and_not_again_after_it_was_ended(site: Site) -> None:
    made = experiment(0)
    run = write_run(site.settings.home, made, "finished", 3).name
    ask = Ask({"run": run, "mesh": "fsdp:2"})
    assert "data-tick" in layout_page.opened(site, ask).regions["result"]
    job = plan_job(site, with_placement(made, ask.query, "fsdp:2", 8), "h200", start=False)
    assert job is not None
    assert job.argv[1:4] == ("-m", "nnxdsl", "plan")
    assert not job.is_over
    layout_page.cancel(site, ask)
    assert job.state == "cancelled"
    for _ in range(2):
        result = layout_page.opened(site, ask).regions["result"]
        assert "Try again" in result
        assert "data-tick" not in result
