"""Every page in a real browser: it opens by its URL, and changing pages is quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from app.pages import PAGES

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_opens_by_its_url(app: Any, open_page: Callable[..., Any], page: Any) -> None:
    shown = open_page(app.url(page.path))
    shown.wait_for_selector(f"#page-{page.name} .region")
    assert shown.title().endswith(f"{page.title} · nnxdsl")
    assert shown.locator(".nnx-page:visible").count() == 1


def test_a_page_switch_is_quick(app: Any, open_page: Callable[..., Any]) -> None:
    shown = open_page(app.url("/"))
    shown.wait_for_selector("#page-runs .region")
    for page in [page for page in PAGES if page.in_navigation][1:]:
        began = time.monotonic()
        shown.get_by_role("link", name=page.title, exact=True).click()
        shown.wait_for_selector(f"#page-{page.name} .region")
        assert time.monotonic() - began < 0.5
