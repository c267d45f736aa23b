"""The page New run; knows no gradio."""

from __future__ import annotations

from .html import tag
from .page import Answer, Ask, Page
from .state import Site


def opened(site: Site, ask: Ask) -> Answer:
    """The page for its query."""
    return Answer({"main": tag("p", "This page is not written yet.", cls="empty")})


PAGE = Page(name="new", path="/new", title="New run", regions=("main",), actions={"open": opened})
