"""Somebody who has never seen it, in an empty directory: to a run, its layout and its outputs by what pages offer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import RunningApp
from tests.app.on_pages import dim_texts, overflow, picture
from tests.waiting import HANG_SECONDS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Open = Callable[..., Any]
BARS = ".js-plotly-plot .bars path"


def state(shown: Any, *names: str) -> None:
    names_json = json.dumps(names)
    shown.wait_for_function(f"{names_json}.some((one) => document.querySelector('.badge')?.textContent.endsWith(one))")


def test_from_nothing_to_a_comparison(tmp_path: Path, environment: dict[str, str], open_page: Open) -> None:
    app = RunningApp(tmp_path, environment)
    app.start()
    try:
        shown = open_page(app.url("/"))
        shown.set_default_timeout(HANG_SECONDS * 1_000)  # it trains
        shown.get_by_role("link", name="Review and edit it first").click()
        shown.wait_for_selector("[id='f-name']")
        shown.get_by_role("button", name="Plan", exact=True).click()
        shown.wait_for_selector(f"#new-panel {BARS}")
        shown.get_by_role("button", name="Launch").click()
        shown.wait_for_url("**/run?id=demo-dpo-*")
        run, address = shown.url.partition("id=")[2], shown.url
        state(shown, "running", "finished")
        state(shown, "finished")
        rows = [json.loads(line) for line in (app.home / run / "metrics.jsonl").read_text().splitlines()]
        last = [row for row in rows if row.get("kind") == "evaluation"][-1]
        assert last["eval/rewards/accuracies"] > 0.8
        picture(shown, "run")
        shown.locator(".buttons").get_by_role("link", name="Layout").click()
        shown.wait_for_selector(BARS)
        shown.goto(address)
        shown.locator(".buttons").get_by_role("link", name="Outputs").click()
        shown.get_by_label("Held-out row").first.click()
        shown.get_by_role("option").nth(1).click()
        shown.get_by_role("button", name="Generate", exact=True).click()
        shown.wait_for_selector(".pane.policy")
        shown.evaluate("window.scrollTo(0, 240)")
        picture(shown, "outputs")
        shown.get_by_role("link", name="Its tokens").first.click()
        shown.wait_for_selector(".heat .token")
        shown.get_by_role("tab", name="Pairs").click()
        shown.get_by_role("button", name="Compute").click()
        shown.wait_for_selector("[role=gridcell]")
        checks = shown.locator("li:has-text('Step 0:'), li:has-text('Metrics of the run:')").all_text_contents()
        assert ["✔" in text for text in checks] == [True, True], checks
        # What the demo started from is a run as well, and the other side of a comparison.
        shown.goto(app.url("/"))
        for row in range(2):
            shown.locator(f"#runs-table [role=gridcell][data-row='{row}'][data-col='0']").click()
            shown.wait_for_selector(f"#runs-table [role=gridcell][data-row='{row}']:has-text('☑')")
        shown.get_by_role("button", name="Compare", exact=True).click()
        shown.wait_for_url("**/compare?ids=*")
        shown.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
        picture(shown, "compare")
        shown.get_by_text("Outputs against the baseline:").get_by_role("link").first.click()
        shown.wait_for_url("**/outputs?run=*%40*")
        shown.get_by_role("textbox", name="Prompt", exact=True).fill("What is the capital of Peru?")
        shown.get_by_role("button", name="Generate", exact=True).click()
        shown.wait_for_selector(".pane.policy")
        assert overflow(shown) == 0
        assert dim_texts(shown) == []
        shown.close()  # or it would ask an app that is gone
    finally:
        app.end()
