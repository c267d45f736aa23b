"""The page of a run in a browser, opened before the run has a directory and never reloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.app.on_pages import dim_texts, overflow
from tests.app.test_lifecycle import CURVE, begin, until

pytestmark = pytest.mark.browser
POINTS = (
    "Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].map((one) => one.calcdata?.[0]?.length ?? 0))"
)
SHIFTS = """window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) for (const { node, previousRect, currentRect } of entry.sources ?? []) {
    const one = node?.nodeType === 1 ? node : node?.parentElement;
    if (one && previousRect.top && currentRect.top !== previousRect.top)
      shifts.push(`${one.tagName}.${one.className} from ${previousRect.top} to ${currentRect.top}`);
  }
}).observe({ type: "layout-shift", buffered: true });"""
COVERED = """() => {
  const [bar, ...texts] = [".modebar", ".gtitle, .annotation-text, .legendtext, .xtitle"].flatMap(
    (which) => [...document.querySelectorAll(which)].map((one) => one.getBoundingClientRect()));
  return texts.filter(
    (t) => t.right > bar.left && t.left < bar.right && t.bottom > bar.top && t.top < bar.bottom).length;
}"""


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_a_page_that_was_opened_at_the_launch_follows_its_run(
    app: Any, open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    shown = open_page(app.url("/new"), width=width, dark=dark)
    shown.add_init_script(SHIFTS)
    path = begin(shown, app, steps="100000")
    shown.wait_for_selector(CURVE)
    tabs = shown.get_by_role("tab").all_inner_texts()
    assert {"Charts", "Log", "Samples"} <= set(tabs) or width < 500  # a narrow page has the last ones in a menu
    points = shown.evaluate(POINTS)
    shown.wait_for_function(f"{POINTS} > {points + 5}")
    until(shown, "running")
    moved = [one for one in shown.evaluate("shifts") if ".tab" in one or "H1" in one]
    assert moved == []  # what grows has its place from the beginning
    shown.locator(".js-plotly-plot").first.hover(position={"x": 150, "y": 120})
    shown.wait_for_selector(".hoverlayer .legendtext")
    readings = shown.locator(".hoverlayer .legendtext").all_text_contents()
    assert all(reading.count(" : ") == 1 and len(reading.split(" : ")[1].split()) == 1 for reading in readings), (
        readings
    )
    assert all(not any(sign.isdigit() for sign in reading.split(" : ")[0]) for reading in readings), readings
    assert shown.evaluate(COVERED) == 0
    assert overflow(shown) == 0
    assert dim_texts(shown) == []
    shown.get_by_role("tab", name="Log", exact=True).click()
    shown.wait_for_function("document.querySelector('#run-log textarea')?.value.includes('training tiny')")
    shutil.move(path, app.project / "moved")
    shown.wait_for_selector(".badge:has-text('missing')")
    shown.wait_for_selector(f":text('{path.name} was moved or deleted')")
    assert shown.locator("[role=tab]").count() == 0
