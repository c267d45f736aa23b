"""Policy and reference of a finished run compared in a real browser, computed by the child process of the app."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory
from tests.app.on_pages import EVIL, dim_texts, overflow

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
SHOTS = os.environ.get("NNXDSL_SCREENSHOTS")
"""A directory for pictures of the pages; none are taken where it is not named."""


@pytest.fixture
def run(app: Any, environment: dict[str, str]) -> Path:
    """The tiny recipe, run to its end from the command line."""
    argv = [sys.executable, "-m", "nnxdsl", "run", "experiments/tiny.py", "--quiet"]
    subprocess.run(argv, cwd=app.project, env=environment, check=True, capture_output=True)
    (path,) = (one for one in app.home.iterdir() if one.name.startswith("tiny-"))
    return path


def shot(shown: Any, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        shown.screenshot(path=f"{SHOTS}/outputs-{name}.png", full_page=True)


POLICY = ".pane.policy"
TOKEN = ".heat .token"
CELL = "[role=gridcell]"


def wait_for_answer(shown: Any, selector: str) -> None:
    """Waits for what the child answers: the first time it loads jax and compiles."""
    shown.wait_for_selector(selector)


def press(shown: Any, name: str) -> None:
    shown.get_by_role("button", name=name, exact=True).click()


def choose(shown: Any, label: str, option: str) -> None:
    shown.get_by_label(label, exact=True).click()
    shown.get_by_role("option", name=option).click()


def test_a_finished_run_is_compared_with_its_reference(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url("/outputs"))
    choose(shown, "Run", run.name)
    shown.get_by_role("tab", name="Generate").wait_for()
    assert f"run={run.name}" in shown.url
    # generate: the greedy answer is the one that the run itself wrote at its end
    shown.get_by_label("Prompt", exact=True).fill("Say 1: ")
    shown.get_by_label("Max new tokens").fill("4")
    press(shown, "Generate")
    shown.wait_for_selector("text=so far")
    wait_for_answer(shown, POLICY)
    last = RunDirectory(run).samples()[-1]
    for side, cls in (("policy", ".pane.policy .answer"), ("reference", ".pane.other .answer")):
        text = shown.locator(cls).text_content()
        assert text == last[side] or (text == "(nothing)" and not last[side])
    assert shown.locator(".as-tokenized").text_content() == "<bos>Say·1:·"
    address = shown.url
    shown.reload()
    wait_for_answer(shown, POLICY)  # kept, and found by the URL
    assert shown.url == address
    assert shown.get_by_label("Max new tokens").input_value() == "4"
    shot(shown, "generate")
    # blind: nothing tells whose is whose before the vote
    shown.get_by_label("Temperature").fill("1.5")
    shown.get_by_label("Max new tokens").fill("12")
    shown.get_by_label("Blind").check()
    press(shown, "Generate")
    wait_for_answer(shown, "text=Temperature: 1.5")  # the answers before are blind as well
    shown.wait_for_selector("h3:text('Answer A')")
    assert shown.locator(POLICY).count() == 0
    assert shown.get_by_role("link", name="Save as JSONL").count() == 0
    shot(shown, "blind")
    press(shown, "A is better")
    wait_for_answer(shown, POLICY)
    shown.wait_for_selector("text=1 of them blind")
    shown.wait_for_selector(".votes [aria-pressed=true]")
    votes = (app.home / ".app" / "votes.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in votes] == [run.name]
    # the tokens of that answer, by keyboard, then of a pair
    shown.get_by_role("link", name="Its tokens").first.click()
    wait_for_answer(shown, TOKEN)
    shown.locator(TOKEN).first.focus()
    shown.keyboard.press("ArrowRight")
    shown.wait_for_selector(f".token-detail {CELL}")
    assert shown.get_by_role("grid").count() == 2
    assert shown.locator(f"{TOKEN}[aria-pressed=true]").count() == 1
    assert shown.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    address = shown.url
    shot(shown, "tokens-answer")
    shown.reload()
    shown.wait_for_selector(f"{TOKEN}[aria-pressed=true]")
    assert shown.url == address
    # pairs: the figures are those of the run's own evaluation, and a row leads to its tokens
    shown.get_by_role("tab", name="Pairs").click()
    press(shown, "Compute")
    wait_for_answer(shown, CELL)
    checks = shown.locator("li", has_text="✔").all_text_contents()
    assert len(checks) == 2, checks
    assert "0 nats is the largest per-token difference" in checks[0]
    with shown.expect_download() as download:
        shown.get_by_role("link", name="Save as CSV").last.click()
    assert download.value.suggested_filename.endswith("-pairs.csv")
    assert len(Path(download.value.path()).read_text().splitlines()) == 11
    shot(shown, "pairs")
    choose(shown, "Order", "best first")
    shown.wait_for_url("**sort=best+first*")
    shown.locator(CELL).nth(1).click()
    shown.get_by_role("link", name="token by token").click()
    wait_for_answer(shown, TOKEN)
    assert shown.locator(".heat:visible").count() == 2
    shot(shown, "tokens-pair")
    tokens = shown.url
    # several prompts at once, with a vote on one of them, whose models are named
    shown.goto(app.url(f"/outputs?run={run.name}"))
    shown.get_by_label("Prompt", exact=True).fill("Say 1: \n---\nSay 2: ")
    shown.get_by_label("Max new tokens").fill("4")
    press(shown, "Generate")
    wait_for_answer(shown, "h3:text('2 of 2: Say 2')")
    wait_for_answer(shown, f"{POLICY} >> nth=1")
    shown.get_by_role("button", name="Reference is better").last.click()
    shown.wait_for_selector("text=1 of them blind")
    votes = (app.home / ".app" / "votes.jsonl").read_text().splitlines()
    assert [json.loads(line)["blind"] for line in votes] == [True, False]
    several = shown.url
    shot(shown, "several")
    # in both themes, on a phone too, every tab fits and can be read
    urls = [
        tokens,
        app.url(f"/outputs?run={run.name}&tab=pairs"),
        several,
    ]
    for width, dark in ((390, False), (390, True), (1280, True)):
        other = open_page(urls[0], width=width, dark=dark)
        for number, url in enumerate(urls):
            other.goto(url)
            wait_for_answer(other, (TOKEN, CELL, POLICY)[number])
            assert overflow(other) == 0, url
            assert dim_texts(other) == [], url
            shot(other, f"{number}-{width}-{'dark' if dark else 'light'}")


WATCHES = """
window.seen = [];
new MutationObserver(() => {
  const running = document.querySelectorAll(".pane.running[data-side=policy] .answer");
  if (running.length) window.seen.push([...running].map((one) => one.textContent));
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def as_in_html(texts: list[str]) -> list[str]:
    """Texts without characters that HTML drops or changes: random tokens have them."""
    return [re.sub(r"[\r\n\0]", "", text) for text in texts]


def test_answers_grow_while_they_are_decoded(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url(f"/outputs?run={run.name}&prompt=Say+1%3A+&max=900&temperature=5&samples=16&seed=1"))
    press(shown, "Generate")
    shown.wait_for_selector("text=so far")
    shown.reload()  # models are being loaded: what comes is the child's, not the page's that asked
    shown.evaluate(WATCHES)
    wait_for_answer(shown, ".pane.running[data-side=policy] .answer")
    assert shown.locator(".pane.running[data-side=other]").count() == 1
    assert shown.get_by_role("button", name="Cancel", exact=True).is_visible()
    wait_for_answer(shown, POLICY)
    (stored,) = [json.loads(file.read_text())["result"] for file in (app.home / ".app" / "outputs").glob("*.json")]
    final = as_in_html([one["text"] for one in (stored["policy"], *stored["policy"]["more"])])
    texts = as_in_html(shown.locator(f"{POLICY} .answer").all_text_contents())
    assert texts == [text or "(nothing)" for text in final]
    seen = [as_in_html(texts) for texts in shown.evaluate("window.seen")]
    assert len(set(map(tuple, seen))) >= 2
    for texts in seen:
        assert all(whole.startswith(text) for whole, text in zip(final, texts, strict=True))
    shown.get_by_role("status").get_by_text("The result is complete.").wait_for(state="attached")
    # what is cancelled ends, and leaves nothing
    shown.get_by_label("Seed").fill("2")
    press(shown, "Generate")
    wait_for_answer(shown, ".pane.running[data-side=policy] .answer")
    press(shown, "Cancel")
    shown.wait_for_selector("text=The request was cancelled")
    shown.wait_for_selector(".pane", state="hidden")


def test_what_models_say_never_runs_and_work_can_be_cancelled(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url(f"/outputs?run={run.name}"))
    shown.get_by_label("Prompt", exact=True).fill(EVIL)
    shown.get_by_label("Max new tokens").fill("1")
    press(shown, "Generate")
    press(shown, "Cancel")
    shown.wait_for_selector("text=The request was cancelled")
    press(shown, "Generate")
    wait_for_answer(shown, POLICY)
    assert EVIL.replace(" ", "·") in shown.locator(".as-tokenized").text_content()
    shown.goto(app.url(f"/outputs?run={run.name}&tab=tokens"))
    shown.get_by_role("textbox", name="Prompt", exact=True).fill(EVIL)
    shown.get_by_role("textbox", name="Answer").fill(EVIL)
    press(shown, "Score with both models")
    wait_for_answer(shown, TOKEN)
    text = shown.locator(".heat:visible").inner_text()
    assert text.count(EVIL) == 2  # tokens of a byte are words still
    shown.locator(TOKEN).nth(3).click()
    shown.wait_for_selector(f".token-detail {CELL}")
    assert shown.evaluate("window.boomed") is None
    assert shown.locator("main img").count() == 0


def test_a_conversation_goes_on_with_each_models_own_answers(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url(f"/outputs?run={run.name}&tab=chat&max=4"))
    for turn, text in enumerate(("Say 1: ", "Say 2: "), start=1):
        message = shown.get_by_label(f"Message, turn {turn} of at most 16")
        message.fill(text)
        press(shown, "Send")
        shown.wait_for_function(f"document.querySelectorAll('.message.bot').length === {2 * turn}")
    address = shown.url
    texts = shown.locator(".message.bot").all_text_contents()
    shown.reload()
    shown.wait_for_function("document.querySelectorAll('.message.bot').length === 4")
    assert shown.url == address
    assert shown.locator(".message.bot").all_text_contents() == texts
    shot(shown, "chat")
    assert dim_texts(shown) == []
    shown.set_viewport_size({"width": 390, "height": 900})
    assert overflow(shown) == 0
    lefts = shown.locator(".bubble-wrap").evaluate_all("all => all.map((one) => one.getBoundingClientRect().left)")
    assert len({round(left) for left in lefts if left >= 0}) == 1  # below each other
    press(shown, "Take back the last turn")
    shown.wait_for_function("document.querySelectorAll('.message.bot').length === 2")
