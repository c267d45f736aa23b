"""The interface of a page: components, and what fills them with the values of the URL's query.

A page is a subclass of `Page` that is listed in `app/pages/__init__.py`. Its `build` adds gradio components, and keeps
those that change as attributes; its `fill` returns their values. Larger pages are made of parts, which do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import gradio as gr
from gradio.blocks import Block

from .state import Site
from .view import Query, Values, View


class Part:
    """Components of a page that are filled together."""

    site: Site
    view: View

    @property
    def components(self) -> list[Block]:
        """The components that `fill` may change: all attributes, also those of parts and those in collections."""
        return list(dict.fromkeys(_blocks(vars(self).values())))


class Page(Part):
    """A page at a URL of its own.

    Attributes:
        name: A short name.
        path: Its path below the app.
        title: Its name in the navigation.
        timer: Fills it again; None to fill it only when the query changes and after actions.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    title: ClassVar[str]
    in_navigation: ClassVar[bool] = True
    timer: gr.Timer | None = None

    def __init__(self, site: Site) -> None:
        """Adds the page to the gradio app that is being built."""
        self.site, self.view = site, View()
        self.build()
        if self.components:
            self.view.refresh(self.fill, self.components, self.timer)

    def build(self) -> None:
        """Adds the components."""
        raise NotImplementedError

    def fill(self, query: Query) -> Values:
        """Returns new values, or updates, of the components that change; an `NnxdslError` is shown on the page."""
        return {}


def _blocks(values: Iterable[object]) -> Iterator[Block]:
    for value in values:
        if isinstance(value, Block):
            yield value
        elif isinstance(value, Part):
            yield from value.components
        elif isinstance(value, dict):
            yield from _blocks(value.values())
        elif isinstance(value, list | tuple):
            yield from _blocks(value)
