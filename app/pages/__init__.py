"""The pages of the app; those of gradio's components are listed in `app/site.py`."""

from __future__ import annotations

from ..page import Page

PAGES: tuple[Page, ...] = ()
