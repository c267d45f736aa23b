"""The run that is offered where nothing is there: what it reads is there and as it should be, and it can be run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.pages import demo
from app.pages import runs as runs_page
from app.processes import demo_data
from app.state import Site
from app.store.experiments import read_python
from tests.app.on_native import built_buttons, offered, updates

drafting = pytest.importorskip("app.pages.new.drafting")
new_page = pytest.importorskip("app.pages.new.page")
outputs_page = pytest.importorskip("app.pages.outputs.page")
native = pytest.importorskip("tests.app.native")


def test_held_out_questions_are_asked_by_no_training_row(tmp_path: Path) -> None:
    demo_data.write(tmp_path)
    rows = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in tmp_path.iterdir()}
    held_out = {row["prompt"][0]["content"] for row in rows["preferences_held_out"]}
    assert len(held_out) == demo_data.HELD_OUT
    assert not held_out & {row["prompt"][0]["content"] for row in rows["preferences"]}
    assert not held_out & {row["messages"][0]["content"] for row in rows["instructions"]}
    for row in rows["preferences"]:  # length tells nothing about manner
        assert len(row["chosen"][0]["content"]) == len(row["rejected"][0]["content"])


def test_where_nothing_is_the_demo_is_offered_on_every_way_in(site: Site) -> None:
    for page in (runs_page.Runs, outputs_page.Outputs):
        built = native.Built(page, site)
        assert "dpo_demo.py" in built.shown()["Code"]
        assert offered(built)["Review and edit it first"] == "/new?demo=1"
        assert demo.START in built_buttons(built)
    assert "(/new?demo=1)" in native.Built(new_page.NewRun, site).shown()["Markdown 3"]
    begun = drafting.begin(site, {"demo": "1"})
    assert site.drafts.load(begun.query["draft"]).texts["name"] == "demo-dpo"
    made, file = demo.written(site)
    assert read_python(file.read_text()) == made


def test_a_projects_own_recipe_goes_before_the_demo(site: Site) -> None:
    place = site.settings.project / "experiments"
    place.mkdir()
    (place / "dpo_mine.py").write_text("Experiment(")
    shown = updates(native.Built(runs_page.Runs, site))
    assert "experiments/dpo_mine.py" in shown["Code"]
    assert not (site.settings.app_directory / "demo").exists()
