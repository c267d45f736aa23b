"""The interface of a page: components, and what fills them with the values of the URL's query.

A page is a subclass of `Page` that is listed in `app/pages/__init__.py`. Its `build` adds gradio components, and keeps
those that change as attributes; its `fill` returns their values. Larger pages are made of parts, which do the same.
"""

from __future__ import annotations

from typing import ClassVar

import gradio as gr

from .state import Site
from .view import Part, Query, Values, View


class Page(Part):
    """A page at a URL of its own."""

    name: ClassVar[str]
    path: ClassVar[str]  # below the app
    title: ClassVar[str]  # in the navigation
    in_navigation: ClassVar[bool] = True
    timer: gr.Timer | None = None  # fills it again; None to fill it only when the query changes and after actions
    site: Site
    view: View

    def __init__(self, site: Site) -> None:
        self.site, self.view = site, View()
        self.build()
        if shown := [*self.components, *self.view.controls_besides(self.components)]:
            self.view.refresh(lambda query: self.view.with_chosen(query, self.fill(query)), shown, self.timer)

    def build(self) -> None:
        """Adds the components."""
        raise NotImplementedError

    def fill(self, query: Query) -> Values:
        """Returns new values, or updates, of the components that change; an `NnxdslError` is shown on the page."""
        return {}
