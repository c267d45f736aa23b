"""Drafts: two tabs on one of them lose nothing, and one that cannot be opened says why and can be discarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.pages.new import form_texts
from app.settings import Settings
from app.state import Site
from nnxdsl import RunError, SpecError, to_dict, to_python
from tests.app.many import experiment, write_run

gr = pytest.importorskip("gradio")
drafting = pytest.importorskip("app.pages.new.drafting")
new_page = pytest.importorskip("app.pages.new.page")
native = pytest.importorskip("tests.app.native")


@pytest.fixture
def draft(site: Site) -> str:
    """Id of a draft."""
    made = experiment(1)
    return site.drafts.new(form_texts.texts_of(made), to_dict(made), "a run").id


def test_two_tabs_do_not_overwrite_each_other(site: Site, draft: str) -> None:
    texts = site.drafts.load(draft).texts

    def change(tab: str, revision: int, **fields: str) -> str:
        form = {"draft": draft, "revision": revision, "tab": tab, "count": 1, "texts": {**texts, **fields}}
        return json.loads(drafting.answer(site, json.dumps(form)))["draft"]

    assert change("one", 0, steps="11") == draft
    assert change("one", 0, steps="12") == draft  # sent before the first answer arrived
    copy = change("other", 0, seed="5")
    assert copy != draft
    assert site.drafts.load(draft).texts["steps"] == "12"
    assert (site.drafts.load(copy).texts["steps"], site.drafts.load(copy).texts["seed"]) == (texts["steps"], "5")
    assert change("other", 0, seed="6") == copy  # sent before the answer that names the copy arrived
    assert site.drafts.load(copy).texts["seed"] == "6"
    shown = native.Built(new_page.NewRun, site).shown(draft=copy, copied="1")
    assert "Another tab has changed this draft" in shown["Markdown"]


def test_what_a_browser_sends_is_checked(site: Site, draft: str) -> None:
    for form in ("", "{", "[]", "{}", '{"draft": 5, "texts": {}}', '{"draft": "../x", "texts": {}}', '{"texts": {}}'):
        assert json.loads(drafting.answer(site, form))["draft"] is None
    texts = site.drafts.load(draft).texts
    form = {"draft": draft, "texts": {**texts, "steps": 5, "nope": "1", "objective.type": "IPO"}}
    assert json.loads(drafting.answer(site, json.dumps(form)))["draft"] == draft
    saved = site.drafts.load(draft).texts
    assert (saved["objective.type"], saved["objective.tau"], "nope" in saved) == ("IPO", "0.1", False)


def test_a_draft_begins_from_a_run_the_demo_or_a_text(site: Site) -> None:
    run = write_run(site.settings.home, experiment(2), "finished", 3).name
    done = drafting.begin(site, {"from": run})
    assert done is not None
    assert done.query == {"draft": done.query["draft"], "demo": "", "preset": "", "from": "", "copied": ""}
    draft = site.drafts.load(done.query["draft"])
    assert (draft.base_name, draft.texts["seed"]) == (run, "2")
    assert drafting.begin(site, done.query) is None
    demo = drafting.begin(site, {"demo": "1"})
    assert site.drafts.load(demo.query["draft"]).texts["name"] == "demo-dpo"
    pasted = drafting.loaded(site, done.query, to_python(experiment(5)))
    draft = site.drafts.load(pasted.query["draft"])
    assert (draft.base_name, draft.texts["seed"]) == (run, "5")  # changes are relative to the draft that was shown
    with pytest.raises(SpecError, match="line 1, column 1"):
        drafting.loaded(site, {}, "import os")
    shown = native.Built(new_page.NewRun, site).shown(**{"from": "no-such-run"})
    assert "there is no run no-such-run" in shown["Markdown 3"]
    assert "Recipes" in shown["Markdown 3"]


def test_a_page_shows_the_draft_its_problems_and_its_changes(site: Site, draft: str) -> None:
    built = native.Built(new_page.NewRun, site)
    assert "demo" in built.shown()["Markdown 3"]
    texts = site.drafts.load(draft).texts
    site.drafts.change(draft, {**texts, "steps": "7"})
    shown = built.shown(draft=draft)
    assert "steps=7" in shown["Code 2"]
    assert "nnxdsl run dpo-0001.py" in shown["Code 3"]
    assert json.loads(shown["Code 4"])["steps"] == 7
    assert shown["Dataframe 1"].values.tolist() == [["[steps](#f-steps)", "100", "7"]]
    assert json.loads(shown["Textbox 1"]) == {"changed": ["steps"], "problems": {}}
    site.drafts.change(draft, {**texts, "steps": "0"})
    shown = built.shown(draft=draft)
    assert "1 problem to fix first" in shown["Markdown"]
    assert "[steps](#f-steps): expected a value &gt; 0, got 0" in shown["Markdown 4"]
    assert json.loads(shown["Textbox 1"])["problems"] == {"steps": "expected a value > 0, got 0"}
    assert all(shown[name]["interactive"] is False for name in ("Button 1", "Button 2", "Button 3"))
    with pytest.raises(SpecError, match="steps: expected a value > 0"):
        drafting.launch(site, {"draft": draft}, "")


def test_an_answer_that_says_nothing_new_sends_nothing(site: Site, draft: str) -> None:
    blocks = native.Built(new_page.NewRun, site).blocks  # else a late answer would undo what was chosen meanwhile
    load = next(one for one in blocks.fns.values() if one.targets[0][1] == "load" and len(one.inputs) == 3)
    *values, digests = load.fn("{}", f"?draft={draft}", "{}")
    assert any(value != gr.skip() for value in values)
    *values, _ = load.fn("{}", f"?draft={draft}", digests)
    assert [value for value in values if value != gr.skip()] == []


def test_a_read_only_app_builds_no_action(tmp_path: Path) -> None:
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    built = native.Built(new_page.NewRun, site)
    site.close()
    assert built.buttons == []
    assert not [one for one in built.blocks.fns.values() if one.fn]


def test_a_tab_that_has_seen_the_others_changes_goes_on(site: Site, draft: str) -> None:
    texts = site.drafts.load(draft).texts
    seen = site.drafts.change(draft, {**texts, "steps": "11"}, "one", "0")
    later = site.drafts.change(draft, {**texts, "steps": "12"}, "other", str(seen.revision))
    assert (later.id, later.texts["steps"]) == (draft, "12")


@pytest.mark.parametrize(
    "damage",
    [
        {"base": {"type": "Nothing"}},
        {"base": {}},
        {"texts": 5},
        {"texts": {"steps": 5}},
    ],
)
def test_a_draft_that_cannot_be_opened_says_why_and_can_be_discarded(
    site: Site, draft: str, damage: dict[str, object]
) -> None:
    file = site.settings.app_directory / "drafts" / f"{draft}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    built = native.Built(new_page.NewRun, site)
    assert "This draft cannot be opened" in built.shown(draft=draft)["Markdown 3"]
    assert built.shown(draft=draft)["Code 1"] == file.read_text()
    assert built.pressed("Discard the draft", {"draft": draft})["goto"] == "/new"
    with pytest.raises(RunError):
        site.drafts.load(draft)
