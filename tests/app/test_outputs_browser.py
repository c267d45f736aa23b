"""Policy and reference of a finished run compared in a real browser, computed by the child process of the app."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory
from tests.app.on_pages import EVIL, dim_texts, overflow

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
Open = Callable[..., Any]
SHOTS = os.environ.get("NNXDSL_SCREENSHOTS")
"""A directory for pictures of the pages; none are taken where it is not named."""


@pytest.fixture
def run(app: Any, environment: dict[str, str]) -> Path:
    """The tiny recipe, run to its end from the command line."""
    words = [sys.executable, "-m", "nnxdsl", "run", "experiments/tiny.py", "--quiet"]
    subprocess.run(words, cwd=app.project, env=environment, check=True, capture_output=True)
    (path,) = (one for one in app.home.iterdir() if one.name.startswith("tiny-"))
    return path


def shot(shown: Any, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        shown.screenshot(path=f"{SHOTS}/outputs-{name}.png", full_page=True)


def answered(shown: Any, selector: str) -> None:
    """Waits for what the child answers: the first time it loads jax and compiles."""
    shown.wait_for_selector(f"#outputs-result {selector}", timeout=240_000)


def test_a_finished_run_is_compared_with_its_reference(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url("/outputs"))
    shown.get_by_role("link", name=run.name).first.click()
    shown.wait_for_selector("#page-outputs .outputs-form")
    assert f"run={run.name}" in shown.url
    # generate: the greedy answer is the one that the run itself wrote at its end
    shown.get_by_label("Prompt", exact=True).fill("Say 1: ")
    shown.get_by_label("Max new tokens").fill("4")
    shown.get_by_role("button", name="Generate").click()
    shown.wait_for_selector("#outputs-result [role=status]")
    answered(shown, ".pane.policy")
    last = RunDirectory(run).samples()[-1]
    for side, cls in (("policy", ".pane.policy .answer"), ("reference", ".pane.other .answer")):
        text = shown.locator(cls).text_content()
        assert text == last[side] or (text == "(nothing)" and not last[side])
    assert shown.locator(".exact").text_content() == "<bos>Say·1:·"
    shown.reload()
    answered(shown, ".pane.policy")  # kept, and found by the URL
    shot(shown, "generate")
    # blind: nothing tells whose is whose before the vote
    shown.get_by_label("Temperature (0: greedy)").fill("1.5")
    shown.get_by_label("Max new tokens").fill("12")
    shown.get_by_label("Blind: hide whose answer is whose until I vote").check()
    shown.get_by_role("button", name="Generate").click()
    answered(shown, "h2:text('Answer A')")
    assert shown.locator("#outputs-result .pane.policy").count() == 0
    shot(shown, "blind")
    shown.get_by_role("button", name="A is better").click()
    answered(shown, ".pane.policy")
    assert "Blind votes on these two" in shown.locator(".votes").text_content()
    votes = (app.home / ".app" / "votes.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in votes] == [run.name]
    # the tokens of that answer, then of a pair
    shown.get_by_role("link", name="Its tokens").first.click()
    shown.get_by_role("button", name="Score with both models").click()
    answered(shown, ".heat .token")
    shown.locator(".heat .token").first.focus()
    shown.keyboard.press("ArrowRight")
    shown.wait_for_selector("#token-detail table")
    assert shown.locator("#token-detail table").count() == 2
    assert shown.locator("#token-detail tbody tr").count() == 10
    shot(shown, "tokens-answer")
    # pairs: the figures are those of the run's own evaluation, and a row leads to its tokens
    shown.get_by_role("link", name="Pairs", exact=True).click()
    shown.get_by_role("button", name="Compute").click()
    answered(shown, "tbody tr")
    assert shown.locator("#outputs-result tbody tr").count() == 10
    checks = shown.locator(".check").all_text_contents()
    assert all(text.startswith("✔") for text in checks), checks
    assert "0 nats is the largest per-token difference" in checks[0]
    with shown.expect_download() as download:
        shown.get_by_role("link", name="Save as CSV").click()
    assert download.value.suggested_filename.endswith("-pairs.csv")
    assert len(Path(download.value.path()).read_text().splitlines()) == 11
    shot(shown, "pairs")
    shown.get_by_role("link", name="best first").click()
    shown.wait_for_selector(".sorts [aria-current]:text('best first')")
    shown.locator("#outputs-result tbody a").first.click()
    shown.get_by_role("button", name="Score with both models").click()
    answered(shown, ".heat")
    assert shown.locator(".heat").count() == 2
    shot(shown, "tokens-pair")
    # in both themes, on a phone too, every tab fits and can be read
    urls = [
        shown.url,
        app.url(f"/outputs?run={run.name}&tab=pairs"),
        app.url(f"/outputs?run={run.name}&prompt=Say+1%3A+&max=4"),
    ]
    for width, dark in ((390, False), (390, True), (1280, True)):
        other = open_page(urls[0], width=width, dark=dark)
        for number, url in enumerate(urls):
            other.goto(url)
            answered(other, (".heat", "tbody tr", ".pane")[number])
            assert overflow(other) == 0, url
            assert dim_texts(other) == [], url
            shot(other, f"{number}-{width}-{'dark' if dark else 'light'}")


def test_what_models_say_never_runs_and_work_can_be_cancelled(app: Any, open_page: Open, run: Path) -> None:
    shown = open_page(app.url(f"/outputs?run={run.name}"))
    shown.get_by_label("Prompt", exact=True).fill(EVIL)
    shown.get_by_label("Max new tokens").fill("1")
    shown.get_by_role("button", name="Generate").click()
    shown.get_by_role("button", name="Cancel").click()
    shown.wait_for_selector("#outputs-result :text('The request was cancelled')")
    shown.get_by_role("button", name="Generate").click()
    answered(shown, ".pane.policy")
    assert EVIL.replace(" ", "·") in shown.locator(".exact").text_content()
    shown.goto(app.url(f"/outputs?run={run.name}&tab=tokens"))
    shown.get_by_label("Prompt", exact=True).fill(EVIL)
    shown.get_by_label("Answer", exact=True).fill(EVIL)
    shown.get_by_role("button", name="Score with both models").click()
    answered(shown, ".heat .token")
    shown.locator(".heat .token").nth(3).click()
    shown.wait_for_selector("#token-detail table")
    assert shown.evaluate("window.boomed") is None
    assert shown.locator(".region img").count() == 0
