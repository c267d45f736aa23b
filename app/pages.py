"""All pages, in the order of the navigation."""

from __future__ import annotations

from . import about_page, compare_page, layout_page, new_page, outputs_page, run_page, runs_page
from .page import Page

PAGES: tuple[Page, ...] = (
    runs_page.PAGE,
    new_page.PAGE,
    run_page.PAGE,
    compare_page.PAGE,
    layout_page.PAGE,
    outputs_page.PAGE,
    about_page.PAGE,
)
