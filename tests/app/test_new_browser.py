"""The form of a new run in a browser: members of tuples, two tabs, what stays in sight, filters, paths in tables."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl import to_json
from tests.app.conftest import ROOT, RunningApp
from tests.app.many import experiment, write_many, write_run
from tests.app.on_pages import EVIL, dim_texts, overflow

pytestmark = pytest.mark.browser
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
    return shown.locator(f"[id='f-{path}'] :is(input, textarea)").first


def choose(shown: Any, path: str, name: str) -> None:
    """Chooses one of a field's classes or values."""
    field(shown, path).click()
    shown.get_by_role("option", name=name, exact=True).click()


def until_value(shown: Any, path: str, text: str) -> None:
    script = "([path, text]) => document.querySelector(`[id='f-${path}'] :is(input, textarea)`)?.value === text"
    shown.wait_for_function(script, arg=[path, text])


def python(shown: Any, text: str) -> None:
    """Waits until the Python of the draft has a text in one of its first lines: others are drawn when scrolled to."""
    shown.wait_for_selector(f"#new-python .cm-line:has-text({json.dumps(text)})")


def opened(open_page: Open, app: RunningApp, query: str, **options: Any) -> Any:
    """The page with the form of a new draft."""
    shown = open_page(app.url(f"/new?{query}"), **options)
    field(shown, "name").wait_for()  # a recipe is read by a process of its own
    return shown


def until_saved(app: RunningApp, shown: Any, **texts: str) -> None:
    """Waits until the draft that is shown has these texts in its file."""
    for _ in range(100):
        draft = re.search("draft=([0-9a-f]+)", shown.url)
        file = app.home / ".app" / "drafts" / f"{draft[1] if draft else ''}.json"
        saved = json.loads(file.read_text())["texts"] if file.exists() else {}
        if texts.items() <= saved.items():
            return
        shown.wait_for_timeout(100)
    raise AssertionError(f"{texts} is not in {saved}")


def test_rewards_of_a_recipe_are_added_and_removed(emptied_app: RunningApp, open_page: Open) -> None:
    for path in (ROOT / "experiments").glob("*.py"):
        shutil.copy(path, emptied_app.project / "experiments" / path.name)
    shown = opened(open_page, emptied_app, "preset=grpo_gemma")
    field(shown, "objective.rewards.0.name").wait_for()
    assert shown.get_by_role("button", name="Launch").is_enabled()
    assert field(shown, "objective.rewards.0.name").input_value() == "kind"
    shown.get_by_role("button", name="Add to rewards").click()
    shown.get_by_role("heading", name="1 problem").wait_for()
    shown.wait_for_function("document.activeElement.closest('.spec-field')?.id === 'f-objective.rewards.2'")
    field(shown, "objective.rewards.2.name").fill("exact_answer")
    until_saved(emptied_app, shown, **{"objective.rewards.2.name": "exact_answer"})
    shown.get_by_role("button", name="Remove rewards 2").click()
    shown.wait_for_selector("[id='f-objective.rewards.2.name']", state="detached")
    assert field(shown, "objective.rewards.1.name").input_value() == "exact_answer"
    shown.get_by_role("button", name="Add to rewards").click()
    field(shown, "objective.rewards.2.name").wait_for()
    assert field(shown, "objective.rewards.2.name").input_value() == ""  # nothing of the one that was removed
    shown.get_by_role("button", name="Remove rewards 3").click()
    shown.wait_for_selector("[id='f-objective.rewards.2.name']", state="detached")
    shown.wait_for_selector("#new-command .cm-line:has-text('python experiments/grpo_gemma.py')")
    shown.reload()
    until_value(shown, "objective.rewards.1.name", "exact_answer")
    assert shown.get_by_role("button", name="Launch").is_enabled()


def test_terms_of_a_sum_are_chosen(emptied_app: RunningApp, open_page: Open) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny")
    field(shown, "objective").wait_for()
    choose(shown, "objective", "Sum")
    for index, term in enumerate(("DPO", "ChosenSFT")):
        shown.get_by_role("button", name="Add to terms").click()
        field(shown, f"objective.terms.{index}").wait_for()
        choose(shown, f"objective.terms.{index}", term)
    field(shown, "objective.terms.0.beta").fill("0.3")
    field(shown, "objective.weights").fill("(1.0, 0.5)")
    python(shown, "beta=0.3")
    shown.reload()
    python(shown, "Objective.ChosenSFT()")
    assert shown.get_by_role("button", name="Launch").is_enabled()


def test_sources_of_a_mixture_are_chosen_with_weights(emptied_app: RunningApp, open_page: Open) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny")
    field(shown, "data").wait_for()
    choose(shown, "data", "Mixture")
    for index in range(2):
        shown.get_by_role("button", name="Add to sources").click()
        field(shown, f"data.sources.{index}.0").wait_for()
        choose(shown, f"data.sources.{index}.0", "Preferences")
        field(shown, f"data.sources.{index}.0.path").fill(f"pairs{index}.jsonl")
    field(shown, "data.sources.1.1").fill("0.25")
    until_saved(emptied_app, shown, **{"data.sources.1.0.path": "pairs1.jsonl", "data.sources.1.1": "0.25"})
    python(shown, "Data.Mixture(")
    shown.reload()
    until_value(shown, "data.sources.1.1", "0.25")
    assert shown.get_by_role("button", name="Launch").is_enabled()


def test_two_tabs_keep_what_each_of_them_shows(emptied_app: RunningApp, open_page: Open) -> None:
    one = opened(open_page, emptied_app, "preset=tiny")
    other = opened(open_page, emptied_app, one.url.partition("?")[2])
    field(one, "steps").fill("21")
    until_saved(emptied_app, one, steps="21")
    field(other, "seed").fill("22")
    other.wait_for_selector("#new-head :text('Another tab has changed this draft')")
    until_saved(emptied_app, other, seed="22")
    assert other.url != one.url
    for shown, steps, seed in ((one, "21", "0"), (other, "12", "22")):
        shown.reload()
        until_value(shown, "steps", steps)
        until_value(shown, "seed", seed)


def test_what_was_typed_while_the_app_was_gone_comes_back(app: RunningApp, open_page: Open, watched: Any) -> None:
    watched.allowed = ("net::ERR_", "Failed to fetch", "onnection")  # while there is no app
    shown = opened(open_page, app, "preset=tiny")
    field(shown, "steps").fill("21")
    until_saved(app, shown, steps="21")
    app.end()
    field(shown, "seed").fill("22")
    shown.get_by_text("Connection to the server was lost").wait_for()
    field(shown, "notes").fill("typed after it was noticed")
    shown.wait_for_timeout(1_500)
    app.start()
    shown.wait_for_event("load")  # gradio reloads a page that has lost its server
    until_saved(app, shown, seed="22", steps="21", notes="typed after it was noticed")
    until_value(shown, "seed", "22")
    until_value(shown, "steps", "21")


def test_a_text_that_is_loaded_takes_nothing_of_the_draft_before_it(emptied_app: RunningApp, open_page: Open) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny")
    field(shown, "steps").fill("21")
    until_saved(emptied_app, shown, steps="21")
    shown.get_by_role("tab", name="Import").click()
    shown.get_by_role("textbox", name="Python or JSON").fill(to_json(experiment(5)))
    shown.get_by_role("button", name="Load", exact=True).click()
    until_value(shown, "seed", "5")
    field(shown, "notes").fill("of the new draft")
    until_saved(emptied_app, shown, notes="of the new draft", seed="5", steps="100")


def test_a_file_is_read_into_the_text_box(emptied_app: RunningApp, open_page: Open) -> None:
    shown = open_page(emptied_app.url("/new"))
    file = {"name": "mine.json", "mimeType": "application/json", "buffer": to_json(experiment(5)).encode()}
    shown.get_by_role("heading", name="Recipes").wait_for()
    shown.get_by_role("button", name="Import Python or JSON").click()
    shown.locator("main input[type=file]").set_input_files(file)
    shown.wait_for_function("document.querySelector('textarea[placeholder^=from]').value.startsWith('{')")
    shown.get_by_role("button", name="Load", exact=True).click()
    until_value(shown, "seed", "5")


def test_answers_that_come_late_change_nothing_that_is_typed(emptied_app: RunningApp, open_page: Open) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny")
    field(shown, "name").wait_for()
    slow = {"offline": False, "latency": 400, "downloadThroughput": -1, "uploadThroughput": -1}
    shown.context.new_cdp_session(shown).send("Network.emulateNetworkConditions", slow)
    field(shown, "name").press("End")
    field(shown, "name").press_sequentially("-and-more", delay=90)
    choose(shown, "objective", "IPO")
    field(shown, "notes").press_sequentially("some words", delay=60)
    field(shown, "objective.tau").wait_for()
    until_saved(emptied_app, shown, notes="some words", name="tiny-and-more", **{"objective.type": "IPO"})
    assert field(shown, "name").input_value() == "tiny-and-more"
    assert field(shown, "notes").input_value() == "some words"
    shown.reload()
    until_value(shown, "notes", "some words")


def test_a_damaged_draft_is_discarded(emptied_app: RunningApp, open_page: Open) -> None:
    shown = open_page(emptied_app.url("/new?preset=tiny"))
    shown.wait_for_url("**/new?draft=*")
    file = emptied_app.home / ".app" / "drafts" / f"{shown.url.partition('draft=')[2]}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base": {"type": "Experiment", "gone": 1}}))
    shown.reload()
    shown.wait_for_selector("main :text('This draft cannot be opened')")
    shown.get_by_role("button", name="Discard the draft").click()
    shown.wait_for_url("**/new")
    shown.get_by_role("heading", name="Recipes").wait_for()
    assert not file.exists()


@pytest.mark.parametrize("width", [1280, 390])
def test_launch_stays_in_sight_and_beside_it_the_problems(emptied_app: RunningApp, open_page: Open, width: int) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny&open=checkpoint", width=width)
    field(shown, "checkpoint.keep").wait_for()
    field(shown, "steps").fill("0")
    shown.get_by_text("1 problem to fix first").wait_for()
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


def test_problems_and_changes_are_marked_and_lead_to_their_fields(emptied_app: RunningApp, open_page: Open) -> None:
    shown = opened(open_page, emptied_app, "preset=tiny&open=checkpoint")
    field(shown, "checkpoint.keep").wait_for()
    field(shown, "checkpoint.keep").fill("0")
    shown.wait_for_selector("[id='f-checkpoint.keep'][data-problem*='expected']")
    assert field(shown, "checkpoint.keep").get_attribute("aria-invalid") == "true"
    shown.locator("#new-form .group.has-checkpoint > button").click()
    shown.wait_for_selector("[id='f-checkpoint.keep']", state="hidden")
    shown.get_by_role("link", name="checkpoint.keep").click()  # unfolds its group
    shown.wait_for_function("document.activeElement.closest('.spec-field')?.id === 'f-checkpoint.keep'")
    field(shown, "checkpoint.keep").fill("9")
    shown.wait_for_selector("[id='f-checkpoint.keep'][data-problem=''][data-changed=true]")
    assert field(shown, "checkpoint.keep").get_attribute("aria-invalid") is None
    shown.get_by_role("tab", name="Changes (1)").click()
    shown.get_by_role("gridcell", name="checkpoint.keep").get_by_role("link").click()
    shown.wait_for_function("document.activeElement.closest('.spec-field')?.id === 'f-checkpoint.keep'")
    shown.get_by_label("Changed fields only").check()
    shown.wait_for_selector("[id='f-steps']", state="detached")
    shown.wait_for_function(
        "document.querySelectorAll(\"#new-form [id^='f-']\").length === 2"
    )  # the class and the field
    shown.reload()
    shown.wait_for_function("document.querySelectorAll(\"#new-form [id^='f-']\").length === 2")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_its_texts_are_readable(
    emptied_app: RunningApp, open_page: Open, width: int, dark: bool
) -> None:
    path = write_run(emptied_app.home, experiment(0, notes=EVIL), "finished", 5)
    (emptied_app.project / "experiments" / "<img src=x onerror=boom()>.py").write_text("Experiment(")
    shown = open_page(emptied_app.url("/new"), width=width, dark=dark)
    shown.get_by_role("link", name="<img src=x onerror=boom()>").wait_for()
    assert shown.locator("main img").count() == 0
    assert overflow(shown) == 0
    shown.goto(emptied_app.url(f"/new?from={path.name}"))
    field(shown, "steps").wait_for()
    until_value(shown, "notes", EVIL)
    assert overflow(shown) == 0
    assert dim_texts(shown) == []
    assert shown.evaluate("window.boomed") is None
    assert shown.locator("main img").count() == 0


def test_a_filter_keeps_letters_that_are_typed_slowly(emptied_app: RunningApp, open_page: Open) -> None:
    write_many(emptied_app.home, 30)
    shown = open_page(emptied_app.url("/"))
    shown.wait_for_selector("#runs-table [role=gridcell]")
    search = shown.get_by_label("Search runs")
    search.press_sequentially("dpo-0012", delay=330)
    shown.wait_for_function("document.querySelector('#runs-table [role=grid]').ariaRowCount === '2'")
    assert search.input_value() == "dpo-0012"
    assert search.evaluate("(one) => one === document.activeElement")
    search.press("ArrowLeft")
    shown.wait_for_timeout(500)
    search.press_sequentially("x", delay=50)
    assert search.input_value() == "dpo-001x2"


def test_paths_of_settings_break_after_their_dots(emptied_app: RunningApp, open_page: Open) -> None:
    one, two = experiment(1), experiment(2, name="b" * 60, notes="n" * 300)
    for made in (one, two):
        write_run(emptied_app.home, made, "finished", 5)
    shown = open_page(emptied_app.url(f"/run?id={two.id}&tab=config&with=run:{one.id}"))
    cells = shown.get_by_role("grid", name="Differences").locator("[role=gridcell][data-col='0'] span")
    cells.first.wait_for()
    for text in cells.all():
        assert len(text.evaluate(LINES)) == 1
