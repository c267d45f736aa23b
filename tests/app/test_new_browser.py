"""The form of a new run in a browser: members of tuples, two tabs, what stays in sight, filters, paths in tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.app.conftest import ROOT, RunningApp
from tests.app.many import experiment, write_many, write_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
Open = Callable[..., Any]

LINES = """(one) => {  // the text of each line that an element takes
  const range = document.createRange(), lines = [];
  const walker = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
  let top = null;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) for (let at = 0; at < node.length; at++) {
    range.setStart(node, at); range.setEnd(node, at + 1);
    const here = range.getBoundingClientRect().top;
    if (top === null || Math.abs(here - top) > 3) { lines.push(""); top = here; }
    lines[lines.length - 1] += node.data[at];
  }
  return lines;
}"""


def field(shown: Any, path: str) -> Any:
    return shown.locator(f"[id='f-{path}']")


def test_rewards_of_a_recipe_are_added_and_removed(emptied_app: RunningApp, open_page: Open) -> None:
    for path in (ROOT / "experiments").glob("*.py"):
        shutil.copy(path, emptied_app.project / "experiments" / path.name)
    shown = open_page(emptied_app.url("/new?preset=grpo_gemma"))
    shown.wait_for_selector(".spec-form")
    assert shown.get_by_role("button", name="Launch").is_enabled()
    assert field(shown, "objective.rewards.0.name").input_value() == "kind"
    shown.get_by_role("button", name="Add to rewards").click()
    shown.get_by_role("heading", name="1 problem").wait_for()
    field(shown, "objective.rewards.2.name").fill("exact_answer")
    shown.wait_for_selector("#new-python:has-text('exact_answer')")
    shown.get_by_role("button", name="Remove rewards 2").click()
    shown.wait_for_selector("[id='f-objective.rewards.2.name']", state="detached")
    assert field(shown, "objective.rewards.1.name").input_value() == "exact_answer"
    shown.wait_for_selector("#new-command:has-text('python experiments/grpo_gemma.py')")
    shown.reload()
    shown.wait_for_selector(".spec-form")
    assert field(shown, "objective.rewards.1.name").input_value() == "exact_answer"
    assert shown.get_by_role("button", name="Launch").is_enabled()


def test_terms_of_a_sum_are_chosen(emptied_app: RunningApp, open_page: Open) -> None:
    shown = open_page(emptied_app.url("/new?preset=tiny"))
    shown.wait_for_selector(".spec-form")
    field(shown, "objective").select_option("Sum")
    for index, term in enumerate(("DPO", "ChosenSFT")):
        shown.get_by_role("button", name="Add to terms").click()
        field(shown, f"objective.terms.{index}").select_option(term)
    field(shown, "objective.terms.0.beta").fill("0.3")
    field(shown, "objective.weights").fill("(1.0, 0.5)")
    shown.wait_for_selector("#new-python:has-text('beta=0.3')")
    shown.reload()
    shown.wait_for_selector("#new-python:has-text('Objective.ChosenSFT()')")
    assert shown.get_by_role("button", name="Launch").is_enabled()


def test_two_tabs_keep_what_each_of_them_shows(emptied_app: RunningApp, open_page: Open) -> None:
    one = open_page(emptied_app.url("/new?preset=tiny"))
    one.wait_for_url("**/new?draft=*")
    other = open_page(one.url)
    other.wait_for_selector(".spec-form")
    field(one, "steps").fill("21")
    one.wait_for_selector("#new-python:has-text('steps=21')")
    field(other, "seed").fill("22")
    other.wait_for_selector(".notice:has-text('Another tab has changed this draft')")
    other.wait_for_selector("#new-python:has-text('seed=22')")
    assert other.url != one.url
    for shown, steps, seed in ((one, "21", "0"), (other, "12", "22")):
        shown.reload()
        shown.wait_for_selector(".spec-form")
        assert (field(shown, "steps").input_value(), field(shown, "seed").input_value()) == (steps, seed)


def test_a_damaged_draft_is_discarded(emptied_app: RunningApp, open_page: Open) -> None:
    shown = open_page(emptied_app.url("/new?preset=tiny"))
    shown.wait_for_url("**/new?draft=*")
    file = emptied_app.home / ".app" / "drafts" / f"{shown.url.partition('draft=')[2]}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base": {"type": "Experiment", "gone": 1}}))
    shown.reload()
    shown.wait_for_selector("[role=alert]:has-text('This draft cannot be opened')")
    shown.get_by_role("button", name="Discard the draft").click()
    shown.wait_for_url("**/new")
    shown.get_by_role("heading", name="Recipes").wait_for()
    assert not file.exists()


@pytest.mark.parametrize("width", [1280, 390])
def test_launch_stays_in_sight_and_beside_it_the_problems(emptied_app: RunningApp, open_page: Open, width: int) -> None:
    shown = open_page(emptied_app.url("/new?preset=tiny"), width=width)
    shown.wait_for_selector(".spec-form")
    field(shown, "steps").fill("0")
    shown.get_by_role("heading", name="1 problem").wait_for()
    shown.evaluate("document.querySelectorAll('.spec-form details').forEach((one) => { one.open = true; })")
    field(shown, "checkpoint.keep").scroll_into_view_if_needed()
    assert shown.evaluate("window.scrollY") > 800
    in_sight = "(one) => { const box = one.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    assert shown.get_by_role("button", name="Launch").evaluate(in_sight)
    assert shown.get_by_text("1 problem to fix first").evaluate(in_sight)
    if width > 900:
        assert shown.get_by_role("heading", name="1 problem").evaluate(in_sight)
    launch = shown.get_by_role("button", name="Launch")
    seen = "const box = one.getBoundingClientRect(); const on_top = document.elementFromPoint(box.x + 5, box.y + 5);"
    assert launch.evaluate(f"(one) => {{ {seen} return one.contains(on_top); }}")


def test_a_filter_keeps_letters_that_are_typed_slowly(emptied_app: RunningApp, open_page: Open) -> None:
    write_many(emptied_app.home, 30)
    shown = open_page(emptied_app.url("/"))
    shown.wait_for_selector("#page-runs tbody tr")
    search = shown.get_by_role("searchbox", name="Search runs")
    search.press_sequentially("dpo-0012", delay=330)
    shown.wait_for_function("document.querySelectorAll('#page-runs tbody tr').length === 1")
    assert search.input_value() == "dpo-0012"
    assert search.evaluate("(one) => one === document.activeElement")
    search.press("ArrowLeft")
    shown.wait_for_timeout(500)
    search.press_sequentially("x", delay=50)
    assert search.input_value() == "dpo-001x2"


def test_paths_break_after_their_dots(emptied_app: RunningApp, open_page: Open) -> None:
    shown = open_page(emptied_app.url("/new?preset=tiny"))
    shown.wait_for_selector(".spec-form")
    field(shown, "name").fill("a" * 60)
    field(shown, "evaluation.prompts").fill("word " * 60)
    field(shown, "evaluation.data.max_completion_length").fill("9")
    field(shown, "optimizer.schedule.lr").fill("1e-9")
    shown.get_by_role("link", name="Changes").click()
    cell = shown.locator("#new-panel td a[data-field='evaluation.data.max_completion_length']")
    cell.wait_for()
    parts = ["evaluation.", "data.", "max_completion_length"]
    lines = cell.evaluate(LINES)
    assert "".join(lines) == "".join(parts)
    assert all(any(line.startswith(part) for part in parts) and len(line) > 4 for line in lines), lines
    one, two = experiment(1), experiment(2, name="b" * 60, notes="n" * 300)
    for made in (one, two):
        write_run(emptied_app.home, made, "finished", 5)
    shown.goto(emptied_app.url(f"/run?id={two.id}&tab=config&with=run:{one.id}"))
    cell = shown.locator("#run-body tbody td:first-child").first
    cell.wait_for()
    for text in shown.locator("#run-body tbody td:first-child").all():
        assert len(text.evaluate(LINES)) == 1
