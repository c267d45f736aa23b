"""A page from outside: the one of the guide, in an app beside the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gradio as gr
import pytest

from app import site as site_module
from app.pages import PAGES
from app.state import Site
from tests.app import native
from tests.app.many import experiment, write_run
from tests.doc_pages import blocks


@pytest.fixture
def page() -> Iterator[Any]:
    (text,) = [one.text for one in blocks("docs/guides/app.md") if one.title == "app/pages/states.py"]
    module = ModuleType("app.pages.states")
    module.__package__ = "app.pages"
    sys.modules[module.__name__] = module
    exec(compile(text, "states.py", "exec"), vars(module))
    yield module.States  # type: ignore[attr-defined]
    del sys.modules[module.__name__]


def test_the_page_of_the_guide_shows_what_it_should(site: Site, page: Any) -> None:
    finished = write_run(site.settings.home, experiment(0), "finished", 100)
    failed = write_run(site.settings.home, experiment(1), "failed", 5)
    built = native.Built(page, site)
    everything = built.shown()["Markdown"].replace("\\", "")
    assert set(everything.split(", ")) == {finished.name, failed.name}
    only = built.shown(state="failed")
    assert (only["State"], only["Markdown"].replace("\\", "")) == ("failed", failed.name)
    assert built.shown(state="running")["Markdown"] == "none"


@pytest.mark.extended
def test_it_is_a_route_of_the_app_and_in_its_navigation(site: Site, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described, describe = list[str](), gr.Blocks.get_config_file

    def counted(self: gr.Blocks) -> Any:
        described.append(self.current_page)
        return describe(self)

    monkeypatch.setattr(gr.Blocks, "get_config_file", counted)

    async def build() -> Any:
        return site_module.build(site, (*PAGES, page))

    blocks_of_app = asyncio.run(build())
    # When it is empty and after its last page, not after each: that took a third of the app's start.
    assert described == ["", "states", "states"]
    assert ("states", "States") in [(path, title) for path, title, *_ in blocks_of_app.pages]
    headers = [
        one.value for one in blocks_of_app.blocks.values() if 'aria-label="Pages"' in str(getattr(one, "value", ""))
    ]
    assert len(headers) == len(PAGES) + 1
    assert all('href="/states"' in header for header in headers)
