"""The list of runs in a browser: pages, order, columns and groups are in the URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl import Optimizer, Schedule
from tests.app.many import experiment, write_run
from tests.app.on_pages import dim_texts, overflow

pytestmark = pytest.mark.browser
CELLS = "[...document.querySelectorAll('#runs-table [role=gridcell]')].map((one) => one.innerText.trim())"


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_columns_order_and_pages_are_chosen(
    emptied_app: Any, open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    for number in range(53):
        optimizer = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4 * (1 + number % 2)))
        write_run(emptied_app.home, experiment(number, optimizer=optimizer), "finished", 3)
    shown = open_page(emptied_app.url("/"), width=width, dark=dark)
    shown.wait_for_selector("#runs-table [role=columnheader]:has-text('optimizer.schedule.lr')")
    assert overflow(shown) == 0
    assert dim_texts(shown) == []
    shown.get_by_role("button", name="Columns, order and groups").click()
    shown.get_by_label("Sort by", exact=True).click()
    shown.get_by_role("option", name="seed", exact=True).click()
    shown.wait_for_function(f"{CELLS}[1]?.startsWith('dpo-0000')")
    shown.get_by_role("button", name="Next").click()
    shown.wait_for_function(f"{CELLS}[1]?.startsWith('dpo-0050')")
    shown.wait_for_url("**/?sort=seed&p=2")
    shown.get_by_label("Search runs").fill("lr>1e-4 seed<4")
    shown.wait_for_selector("#runs-table :text('2 runs in')")
    shown.reload()
    shown.wait_for_function(f"{CELLS}[1]?.startsWith('dpo-0001')")
    assert (
        shown.evaluate(
            "[...document.querySelectorAll('#runs-table [role=gridcell]')].filter("
            "(one) => /^[\\d.e-]+$/.test(one.innerText.trim()) && one.scrollWidth > one.clientWidth).length"
        )
        == 0
    )
