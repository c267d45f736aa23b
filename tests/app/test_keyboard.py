"""Three jobs from nothing, by the keyboard alone: launch a run, inspect its layout, compare policy and reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.app.conftest import RunningApp

pytestmark = pytest.mark.browser
MOST_TABS = 150
FOCUSED = """(inside) => {
  const one = document.activeElement;
  if (!one.closest(inside)) return "";
  const label = one.getAttribute("aria-label") || one.labels?.[0]?.innerText;
  return (label || one.innerText || "").trim().split("\\n")[0];
}"""
"""The name of what has the focus, as a screen reader begins to say it."""


class Keyboard:
    """A user without a mouse: moves the focus by Tab, and types."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.lines: list[str] = []

    def to(self, name: str, *, inside: str = "body", back: bool = False) -> None:
        """Presses Tab until what has a name of these first words, in a part of the page, has the focus."""
        for count in range(1, MOST_TABS + 1):
            self.shown.keyboard.press("Shift+Tab" if back else "Tab")
            if f"{self.shown.evaluate(FOCUSED, inside)} ".startswith(f"{name} "):
                self.lines.append(f"Tab x {count}: {name}")
                return
        raise AssertionError(f"{MOST_TABS} tabs did not reach {name!r}: {self.lines}")

    def press(self, key: str) -> None:
        self.shown.keyboard.press(key)
        self.lines.append(key)

    def type(self, text: str) -> None:
        self.shown.keyboard.press("Control+a")
        self.shown.keyboard.type(text)
        self.lines.append(f"type {text!r}")

    def waits(self, selector: str) -> None:
        self.shown.wait_for_selector(selector)
        self.lines.append(f"  -> {selector} at {self.shown.evaluate('location.pathname')}")


def test_three_jobs_from_nothing(emptied_app: RunningApp, open_page: Callable[..., Any]) -> None:
    recipes = emptied_app.project / "experiments"
    (recipes / "tiny.py").rename(recipes / "dpo_tiny.py")
    shown = open_page(emptied_app.url("/"))
    user = Keyboard(shown)

    # Launch: the recipe that the empty page offers, with another number of steps.
    user.waits("text=No runs yet")
    user.to("Review and edit it first")
    user.press("Enter")
    user.waits("[id='f-steps'] input")
    user.to("steps")
    user.type("8")
    user.to("Launch", back=True)
    user.press("Enter")
    user.waits("h1:has-text('tiny-')")
    run = shown.url.partition("id=")[2]
    user.waits(".badge:has-text('finished')")
    rows = [json.loads(line) for line in (emptied_app.home / run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "grad_norm" in row] == list(range(8))

    # Inspect the layout: on two devices, the blocks of an array.
    user.to("Layout", inside=".buttons")
    user.press("Enter")
    user.waits(".js-plotly-plot .bars path")
    user.to("Mesh")
    user.type("fsdp:2")
    user.press("Enter")
    user.waits("main h3:has-text('fsdp=2')")
    user.waits(".js-plotly-plot .bars path")
    user.to("Arrays with")
    user.type("down.kernel")
    user.waits("[role=gridcell]:has-text('down.kernel')")
    user.to("Part")
    user.to("0", inside="[role=gridcell]")
    user.press("Enter")
    user.waits("main h2:has-text('down.kernel')")
    user.to("device 0", inside=".device-grid")
    user.press("ArrowRight")
    assert "device 1" in shown.evaluate("document.activeElement.ariaLabel")

    # Compare policy and reference: answers to a prompt, and log-probs of their tokens.
    user.to("Outputs", inside="nav")
    user.press("Enter")
    user.waits("main h1:has-text('Outputs')")
    user.to("Run")
    user.type(run)
    shown.get_by_role("option", name=run).wait_for()
    user.press("Enter")
    user.waits("button:has-text('Generate')")
    user.to("Prompt")
    user.type("Say 3: ")
    user.to("Generate")
    user.press("Enter")
    user.waits(".pane.policy")
    user.waits(".pane.other")
    user.to("Its tokens")
    user.press("Enter")
    shown.wait_for_url("**tab=tokens**")
    user.waits("button:has-text('Score with both models')")
    user.to("Score with both models")
    user.press("Enter")
    user.waits(".heat .token")
    assert shown.locator(".heat .token").count() > len("Say 3: ")
    print(*user.lines, sep="\n")
