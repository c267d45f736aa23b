"""Drafts: two tabs on one of them lose nothing, and one that cannot be opened says why and can be discarded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page import Ask
from app.pages.new import form_texts
from app.pages.new import page as new_page
from app.settings import Settings
from app.state import Site
from nnxdsl import RunError, to_dict
from tests.app.many import experiment


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path))
    yield site
    site.close()


@pytest.fixture
def draft(site: Site) -> str:
    """Id of a draft."""
    made = experiment(1)
    return site.drafts.new(form_texts.texts_of(made), to_dict(made), "a run").id


def test_two_tabs_do_not_overwrite_each_other(site: Site, draft: str) -> None:
    texts = site.drafts.load(draft).texts

    def change(tab: str, revision: int, **fields: str) -> new_page.Answer:
        payload = {"fields": {**texts, **fields}, "changed": "steps", "tab": tab, "revision": str(revision)}
        return new_page.change(site, Ask({"draft": draft}, payload))

    assert change("one", 0, steps="11").notice is None
    assert change("one", 0, steps="12").notice is None  # sent before the first answer arrived
    answer = change("other", 0, seed="5")
    assert answer.notice is not None
    assert "Another tab" in answer.notice
    copy = str(answer.query).partition("draft=")[2]
    assert site.drafts.load(draft).texts["steps"] == "12"
    assert (site.drafts.load(copy).texts["steps"], site.drafts.load(copy).texts["seed"]) == (texts["steps"], "5")
    assert change("other", 0, seed="6").query == f"draft={copy}"  # sent before the answer that names the copy arrived
    assert site.drafts.load(copy).texts["seed"] == "6"


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
    file = site.settings.own / "drafts" / f"{draft}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    answer = new_page.opened(site, Ask({"draft": draft}))
    assert "This draft cannot be opened" in str(answer.regions["form"])
    assert 'data-do="new.discard"' in str(answer.regions["form"])
    assert new_page.discard(site, Ask({"draft": draft})).goto == "/new"
    with pytest.raises(RunError):
        site.drafts.load(draft)
