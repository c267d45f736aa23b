"""The interface of a page: a name, a path, and a function that adds gradio components.

A page is one file with a `PAGE = Page(...)` that is listed in `app/pages/__init__.py`; `app/view.py` connects its
components with the query of the URL, and says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .state import Site


@attrs.frozen(kw_only=True)
class Page:
    """A page at a URL of its own: `path`, below the app; `build` adds its components."""

    name: str
    path: str
    title: str
    build: Callable[[Site], None]
    in_navigation: bool = True
