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

pytestmark = pytest.mark.browser
Open = Callable[..., Any]


@pytest.fixture
def app(emptied_app: Any) -> Any:
    return emptied_app


def shoot(shown: Any, name: str) -> None:
    """Keeps a picture where `NNXDSL_SCREENSHOTS` names a directory."""
    place = os.environ.get("NNXDSL_SCREENSHOTS")
    if place:
        shown.screenshot(path=Path(place) / f"{name}.png", full_page=True)


BARS = ".js-plotly-plot .bars path"


def choose(shown: Any, label: str, text: str) -> None:
    """Types a value that is not offered, and leaves with the keyboard."""
    box = shown.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Tab")


def test_a_layout_from_a_recipe_to_two_meshes(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/layout"))
    shown.get_by_role("link", name="tiny", exact=True).click()
    shown.wait_for_url("**/layout?exp=tiny")
    shown.wait_for_selector("h3:has-text('one device')")
    choose(shown, "Mesh", "fsdp:2,tensor:2")
    choose(shown, "Compare with mesh", "data:2")
    shown.wait_for_url("**mesh=fsdp%3A2%2Ctensor%3A2&mesh2=data%3A2")
    shown.wait_for_selector("h3:has-text('data=2') ~ p:has-text('✔ fits')")
    shown.wait_for_selector("h3:has-text('fsdp=2') ~ p:has-text('✔ fits')")
    shown.wait_for_selector(BARS)
    shown.locator(".device-grid").nth(1).wait_for()
    assert shown.locator(".device-grid").count() == 2
    assert shown.locator("button.device").count() == 6
    search = shown.get_by_label("Arrays with")
    search.press_sequentially("query", delay=330)  # answers come while letters are typed
    shown.wait_for_url("**&q=query")
    shown.wait_for_selector(":text('48 of 226 arrays')")
    assert search.evaluate("one => one === document.activeElement")
    assert search.input_value() == "query"
    shown.locator("[role=gridcell]:has-text('query.kernel')").first.click()
    shown.wait_for_selector("h2:has-text('query.kernel (frozen)')")
    address = shown.url
    assert "array=frozen%3Alayers" in address
    text = shown.locator(".devices").first.inner_text()
    shown.reload()
    shown.wait_for_selector("h2:has-text('query.kernel (frozen)')")
    shown.wait_for_selector(".devices")
    assert shown.url == address
    assert shown.locator(".devices").first.inner_text() == text
    shown.wait_for_selector("[role=gridcell]:has-text('its axes were free')")
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
        other.wait_for_selector(BARS)
        other.wait_for_selector("h2:has-text('query.kernel (frozen)')")
        other.wait_for_timeout(300)
        shoot(other, f"layout-{name}")
        assert overflow(other) == 0
        assert dim_texts(other) == []
        assert other.locator("main img").count() == 0


def test_what_is_wrong_is_said_and_rules_are_applied(app: Any, open_page: Open) -> None:
    run = write_run(app.home, experiment(0), "finished", 3).name
    shown = open_page(app.url(f"/layout?run={run}&mesh=fdsp:2"))
    problem = shown.get_by_label("Problem")
    problem.wait_for()
    assert "did you mean 'fsdp'?" in problem.input_value()
    shown.get_by_label("Mesh", exact=True).click()
    shown.get_by_role("option", name="data:1", exact=True).click()
    problem.wait_for(state="hidden")
    shown.get_by_role("button", name="Cancel", exact=True).click()
    shown.wait_for_selector(":text('The plan was cancelled')")
    shown.get_by_role("button", name="Try again").click()
    shown.wait_for_selector(BARS)
    shown.get_by_text("Custom rules").click()
    rules = shown.get_by_label("Rules The first")
    rules.fill("embed")
    shown.get_by_role("button", name="Apply rules").click()
    shown.wait_for_selector(".toast-body:has-text('line 1')")
    rules.fill("embed: -")
    shown.get_by_role("button", name="Apply rules").click()
    shown.wait_for_url("**rules=embed%3A+-")
    shown.wait_for_selector("button:has-text('Custom rules (1)')")


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
    shown.wait_for_selector(BARS)
    assert shown.locator("p:has-text('✔ fits')").count() == 1
    picture(shown, "layout")
    choose(shown, "Memory per device (GiB)", "12")
    shown.wait_for_selector("p:has-text('with 12 GiB')")
    assert "device=h100&" in shown.url
    assert "memory=12" in shown.url
    shown.get_by_text("Custom rules").click()
    shown.get_by_label("Rules for arrays with matching paths").fill("*.mlp.* | mlp: -, embed: -")
    shown.get_by_role("button", name="Apply rules").click()
    shown.wait_for_selector("p:has-text('✘')")


def test_the_layout_is_checked_by_the_compiler(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(0), "finished", 3)
    shown = open_page(app.url(f"/layout?run={path.name}&device=cpu&mesh=fsdp:2"))
    shown.wait_for_selector(BARS)
    shown.get_by_role("button", name="Verify by compiling").click()
    shown.wait_for_selector(":text('Collectives of one step')")
    assert shown.locator(":text('XLA needs')").count() >= 1
    shoot(shown, "layout-compiled")


def test_runs_are_compared_from_the_list(app: Any, open_page: Open) -> None:
    first = write_run(app.home, experiment(0), "finished", 80)
    write_run(app.home, experiment(1, objective=Objective.IPO(tau=0.2), notes=EVIL), "finished", 60)
    third = write_run(app.home, experiment(2), "failed", 40)
    shown = open_page(app.url("/"))
    for name in (first.name, "dpo-0001"):
        row = shown.locator(f"#runs-table [role=gridcell]:has-text('{name}')").get_attribute("data-row")
        shown.locator(f"#runs-table [role=gridcell][data-row='{row}'][data-col='0']").click()
        shown.wait_for_selector(f"#runs-table [role=gridcell][data-row='{row}']:has-text('☑')")
    assert first.name in shown.url
    shown.get_by_role("button", name="Compare", exact=True).click()
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
    address, text = shown.url, shown.get_by_role("grid").first.inner_text()
    shown.reload()
    shown.wait_for_selector(f"[role=grid] :text('{third.name} (baseline)')")
    assert (shown.url, shown.get_by_role("grid").first.inner_text()) == (address, text)
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
