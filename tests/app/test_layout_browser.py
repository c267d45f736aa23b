"""Layout and Compare in a real browser: from a choice to a plan, with the keyboard, at two widths, in both themes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Objective
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL, dim_texts, overflow, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
Open = Callable[..., Any]
PATIENCE = 240_000


@pytest.fixture
def app(emptied_app: Any) -> Any:
    return emptied_app


def shoot(shown: Any, name: str) -> None:
    """Keeps a picture where `NNXDSL_SCREENSHOTS` names a directory."""
    place = os.environ.get("NNXDSL_SCREENSHOTS")
    if place:
        shown.screenshot(path=Path(place) / f"{name}.png", full_page=True)


def test_a_layout_from_a_recipe_to_two_meshes(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/layout"))
    shown.get_by_role("link", name="tiny experiments/tiny.py").click()
    shown.get_by_label("fsdp", exact=True).fill("2")
    shown.get_by_label("tensor", exact=True).fill("2")
    shown.get_by_label("Compare with mesh").fill("data:2")
    shown.get_by_role("button", name="Show", exact=True).click()
    shown.wait_for_url("**mesh=fsdp%3A2%2Ctensor%3A2&mesh2=data%3A2")
    shown.wait_for_selector("#layout-result .layout-summary:nth-child(2) .verdict", timeout=PATIENCE)
    assert shown.locator(".verdict.fits").count() == 2
    assert shown.locator(".device-grid").count() == 2
    assert shown.locator("button.device").count() == 6
    shown.get_by_role("searchbox", name="Arrays with").press_sequentially("query")
    shown.wait_for_function("document.querySelectorAll('table.arrays > tbody > tr').length < 20")
    assert shown.evaluate("document.activeElement.id") == "layout-q"
    shown.get_by_role("link", name="query.kernel").first.click()
    shown.wait_for_selector("table.arrays tr.chosen")
    address = shown.url
    told = shown.locator("#layout-drawing").inner_text()
    shown.reload()
    shown.wait_for_selector("table.arrays tr.chosen")
    assert shown.url == address
    assert shown.locator("#layout-drawing").inner_text() == told
    shown.locator("table.arrays td.why details").first.locator("summary").click()
    shown.wait_for_selector(".why-list:has-text('its axes were free')")
    cell = shown.locator("button.device").first
    cell.focus()
    shown.keyboard.press("ArrowRight")
    shown.wait_for_function("document.activeElement.getAttribute('aria-label').startsWith('device 1 (')")
    line = shown.locator(".reading-cell").first.text_content()
    assert "block" in line
    assert ":" in line
    assert shown.locator("button.device.same").count() >= 1
    with shown.expect_download() as saved:
        shown.get_by_role("link", name="Download CSV").click()
    assert "query" in saved.value.path().read_text()
    for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
        other = open_page(address, width=width, dark=dark)
        other.wait_for_selector("table.arrays tr.chosen")
        other.wait_for_timeout(300)
        shoot(other, f"layout-{name}")
        assert overflow(other) == 0
        assert dim_texts(other) == []


LARGE = """
from nnxdsl import *

experiment = Experiment(
    name="dpo-gemma3-12b",
    model=Model.Gemma3("12b", weights=Weights.HF("google/gemma-3-12b-it")),
    adapter=Adapter.LoRA(rank=16, alpha=32.0, targets=("attention", "mlp")),
    objective=Objective.DPO(beta=0.1),
    data=Data.Preferences("pairs.jsonl", max_prompt_length=512, max_completion_length=512),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-6, warmup_ratio=0.1)),
    batch_size=64,
    microbatch_size=8,
    steps=2_000,
)
"""


def test_a_large_model_on_devices_that_are_not_here(app: Any, open_page: Open) -> None:
    (app.project / "experiments" / "dpo_gemma_12b.py").write_text(LARGE)
    shown = open_page(app.url("/layout?exp=dpo_gemma_12b&device=h100&mesh=fsdp:4,tensor:2"))
    shown.wait_for_selector(".memory-parts", timeout=PATIENCE)
    assert shown.locator(".verdict.fits").count() == 1
    picture(shown, "layout")
    shown.get_by_label("Memory per device (GiB)").fill("12")
    shown.get_by_text("Custom rules").click()
    shown.get_by_label("Rules for arrays with matching paths").fill("*.mlp.* | mlp: -, embed: -")
    shown.get_by_role("button", name="Show", exact=True).click()
    shown.wait_for_selector(".verdict.bad:has-text('with 12 GiB')", timeout=PATIENCE)
    assert "device=h100%3A12" in shown.url


def test_the_layout_is_checked_by_the_compiler(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(0), "finished", 3)
    shown = open_page(app.url(f"/layout?run={path.name}&device=cpu&mesh=fsdp:2"))
    shown.wait_for_selector(".memory-parts", timeout=PATIENCE)
    shown.get_by_role("button", name="Verify by compiling").click()
    shown.wait_for_selector("#layout-result :text('Collectives of one step')", timeout=PATIENCE)
    shoot(shown, "layout-compiled")


def test_runs_are_compared_from_the_list(app: Any, open_page: Open) -> None:
    first = write_run(app.home, experiment(0), "finished", 80)
    write_run(app.home, experiment(1, objective=Objective.IPO(tau=0.2), notes=EVIL), "finished", 60)
    third = write_run(app.home, experiment(2), "failed", 40)
    shown = open_page(app.url("/"))
    shown.wait_for_selector("#page-runs tbody tr")
    shown.get_by_label(f"Tick {first.name}").check()
    shown.get_by_label("Tick dpo-0001").check()
    shown.get_by_role("button", name="Compare").click()
    shown.wait_for_url("**/compare?ids=*")
    curves = ".js-plotly-plot .scatterlayer .trace"
    shown.wait_for_selector(curves)
    two = shown.locator(curves).count()
    assert shown.locator("li:has-text('! seed')").count() == 1
    shown.get_by_label("Runs", exact=True).click()
    shown.get_by_role("option", name=third.name).click()
    shown.wait_for_function(f"document.querySelectorAll('{curves}').length > {two}")
    assert third.name in shown.url
    shown.keyboard.press("Escape")
    shown.get_by_label("All settings").check()
    shown.get_by_placeholder("Filter...").last.fill("batch_size")  # a table draws the rows in view alone
    shown.wait_for_selector("[role=gridcell]:has-text('batch_size')")
    shown.get_by_label("Baseline", exact=True).click()
    shown.get_by_role("option", name=third.name).click()
    shown.wait_for_selector(f"[role=grid] :text('{third.name} (baseline)')")
    address, told = shown.url, shown.get_by_role("grid").first.inner_text()
    shown.reload()
    shown.wait_for_selector(f"[role=grid] :text('{third.name} (baseline)')")
    assert (shown.url, shown.get_by_role("grid").first.inner_text()) == (address, told)
    with shown.expect_download() as saved:
        shown.get_by_role("link", name="Markdown").click()
    assert "| last loss |" in saved.value.path().read_text()
    for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
        other = open_page(address.replace("config=all", ""), width=width, dark=dark)
        other.wait_for_selector(curves)
        other.wait_for_timeout(300)
        shoot(other, f"compare-{name}")
        assert overflow(other) == 0
        assert dim_texts(other) == []
        assert other.locator("main img").count() == 0
