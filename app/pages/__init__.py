"""All pages, in the order of the navigation."""

from __future__ import annotations

from ..page import Page
from . import about as about_page
from . import runs as runs_page
from .run import page as run_page

PAGES: tuple[Page, ...] = (
    runs_page.PAGE,
    run_page.PAGE,
    about_page.PAGE,
)
