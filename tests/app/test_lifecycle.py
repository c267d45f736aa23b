"""Runs started in the browser, on their way to the end, to a stop, to a kill; and what an app's end does to them."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import RunningApp
from tests.app.many import experiment, write_run
from tests.app.on_pages import picture

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
LONG = 200_000
CURVE = ".js-plotly-plot .scatterlayer .trace"
STEP = "document.querySelector('progress')?.value"


def begin(shown: Any, app: Any, **fields: str) -> Path:
    """Launches the tiny recipe from the form with other values in some fields; returns the run's directory."""
    shown.goto(app.url("/new"))
    shown.get_by_role("link", name="tiny", exact=True).click()
    shown.wait_for_url("**/new?draft=*")
    shown.goto(f"{shown.url}&open=optimizer,evaluation,checkpoint")
    for path, text in fields.items():
        field(shown, path.replace("__", ".")).fill(text)
    shown.get_by_role("button", name="Launch").click()
    shown.wait_for_url("**/run?id=*")
    return app.home / shown.url.partition("id=")[2]


def field(shown: Any, path: str) -> Any:
    return shown.locator(f"[id='f-{path}'] :is(input, textarea)").first


def until(shown: Any, *states: str) -> None:
    """Waits until the run that is shown has one of the states."""
    states_json = json.dumps(states)
    shown.wait_for_function(f"{states_json}.some((s) => document.querySelector('.badge')?.textContent.endsWith(s))")


def test_a_run_goes_from_the_form_to_its_end_while_its_app_is_killed(app: Any, open_page: Open, watched: Any) -> None:
    watched.allowed = ("net::ERR_", "Failed to fetch", "onnection")  # while there is no app
    shown, other = open_page(app.url("/new")), open_page(app.url("/"))
    path = begin(shown, app, steps="14", optimizer__schedule__lr="1e-3")
    until(shown, "compiling", "running")
    other.wait_for_selector(f"#runs-table [role=gridcell]:has-text('{path.name}')")
    app.end(signal.SIGKILL)
    time.sleep(3)
    app.start()
    until(shown, "finished")  # the page that was open all the time goes on by itself
    shown.reload()
    until(shown, "finished")
    shown.wait_for_selector(CURVE)
    assert shown.locator(CURVE).count() >= 5
    picture(shown, "run")
    assert json.loads((path / "status.json").read_text())["exit_code"] == 0
    for tab, text in (
        ("Config", "lr=0.001"),
        ("Samples", "Say 1:"),
        ("Environment", "Attempt 1"),
        ("Events", "finished"),
    ):
        shown.get_by_role("tab", name=tab).click()
        shown.locator(f"[role=tabpanel] :text('{text}')").locator("visible=true").first.wait_for()
    shown.get_by_role("tab", name="Log").click()
    shown.wait_for_function("document.querySelector('#run-log textarea')?.value.includes('finished at step 14')")
    log = "(() => { const one = document.querySelector('#run-log textarea'); "
    shown.wait_for_function(f"{log} return one.scrollTop + one.clientHeight > one.scrollHeight - 20; }})()")
    other.wait_for_selector("#runs-table [role=gridcell]:has-text('✔ finished')")
    picture(other, "runs")
    launched = json.loads(next((app.home / ".app" / "launches").iterdir()).joinpath("launch.json").read_text())
    assert launched["argv"][1] == "experiments/tiny.py"
    assert {"steps=14", "optimizer.schedule.lr=0.001"} <= set(launched["argv"])


def test_stop_resume_and_kill(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/new"))
    path = begin(shown, app, steps=str(LONG), checkpoint__every_steps="50", evaluation__every_steps=str(LONG))
    until(shown, "running")
    shown.wait_for_function(f"{STEP} > 20")
    shown.get_by_role("button", name="Stop and save").click()
    until(shown, "stopped")
    saved = json.loads((path / "status.json").read_text())["checkpoint"]
    assert saved > 20
    shown.get_by_role("button", name="Resume").click()
    until(shown, "running")
    shown.wait_for_function(f"{STEP} > {saved}")
    shown.get_by_role("button", name="Kill").click()
    shown.locator(".question").get_by_role("button", name="Kill").click()
    until(shown, "lost")
    shown.wait_for_selector(":text('was killed by signal 9')")  # seen by its launch, not by a heart that stopped
    steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(set(steps)) >= len(steps) - 1  # an evaluation of step 0 beside its figures
    shown.get_by_role("tab", name="Events").click()
    for action in ("run", "stop", "resume", "kill"):
        shown.locator(f"[role=gridcell] :text-is('{action}')").first.wait_for()


def test_what_is_refused_says_why_and_can_be_changed(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/new"))
    begin(shown, app, data__path="nowhere.jsonl")
    until(shown, "refused")
    shown.wait_for_selector(".cm-content:has-text('nowhere.jsonl')")
    shown.get_by_role("link", name="Edit", exact=True).click()
    shown.wait_for_url("**/new?draft=*")
    draft = shown.url
    field(shown, "data.path").wait_for()
    assert field(shown, "data.path").input_value() == "nowhere.jsonl"
    field(shown, "data.path").fill("pairs.jsonl")
    field(shown, "steps").fill("0")
    shown.get_by_role("heading", name="1 problem").wait_for()
    assert shown.get_by_role("button", name="Launch").is_disabled()
    shown.reload()
    shown.get_by_role("heading", name="1 problem").wait_for()
    field(shown, "data.path").wait_for()
    assert field(shown, "data.path").input_value() == "pairs.jsonl"
    shown.get_by_role("link", name="steps", exact=True).click()
    shown.wait_for_function("document.activeElement.closest('.spec-field')?.id === 'f-steps'")
    shown.close()
    app.end()
    app.start()
    again = open_page(draft)
    field(again, "steps").wait_for()
    assert field(again, "steps").input_value() == "0"


def test_the_form_follows_its_classes_and_takes_python_in(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/new?preset=tiny&open=evaluation"))
    field(shown, "objective").wait_for()
    field(shown, "objective").click()
    shown.get_by_role("option", name="IPO", exact=True).click()
    field(shown, "objective.tau").wait_for()
    shown.wait_for_selector("#new-python .cm-line:has-text('Objective.IPO')")
    field(shown, "evaluation").click()
    shown.get_by_role("option", name="none", exact=True).click()
    shown.wait_for_selector("[id='f-evaluation.every_steps']", state="detached")
    shown.get_by_role("tab", name="Changes").click()
    shown.wait_for_selector("#new-panel [role=gridcell]:has-text('IPO')")
    picture(shown, "new")
    shown.get_by_role("tab", name="JSON", exact=True).click()
    shown.wait_for_selector("#new-json .cm-line:has-text('Objective')")
    draft = app.home / ".app" / "drafts" / f"{re.search('draft=([0-9a-f]+)', shown.url)[1]}.json"
    text = {**json.loads(draft.read_text())["base"], "seed": 77}
    shown.get_by_role("tab", name="Import", exact=True).click()
    panel = shown.locator("#new-panel")
    panel.get_by_label("Python or JSON").fill("import os")
    panel.get_by_role("button", name="Load", exact=True).click()
    shown.wait_for_selector(".toast-body:has-text('line 1, column 1')")
    panel.get_by_label("Python or JSON").fill(json.dumps(text))
    panel.get_by_role("button", name="Load", exact=True).click()
    shown.wait_for_function("document.querySelector(`[id='f-seed'] input`)?.value === '77'")
    shown.wait_for_selector("#new-python .cm-line:has-text('Objective.DPO')")  # what was read is shown as Python


def test_a_plan_is_worked_out_beside_the_form(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/new?preset=tiny"))
    field(shown, "name").wait_for()
    shown.get_by_role("tab", name="Plan", exact=True).click()
    shown.wait_for_selector("#new-panel .js-plotly-plot")
    shown.wait_for_selector("#new-panel [role=gridcell]:has-text('parameters')")


def test_what_waits_begins_by_itself(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/new?preset=tiny"))
    field(shown, "data.path").wait_for()
    field(shown, "data.path").fill("nowhere.jsonl")
    shown.get_by_role("button", name="Queue").click()
    shown.wait_for_url("**/run?id=*")
    until(shown, "refused")


def test_read_only_apps_have_no_actions_that_write(project: Path, environment: dict[str, str], open_page: Open) -> None:
    path = write_run(project / "runs", experiment(0), "stopped", 5)
    app = RunningApp(project, environment, ("--read-only",))
    app.start()
    try:
        shown = open_page(app.url(f"/run?id={path.name}"))
        shown.wait_for_selector(f"h1:has-text('{path.name}')")
        assert shown.get_by_role("link", name="Layout").count() == 2  # in the navigation, and the run's
        assert shown.get_by_role("button", name="Resume").count() == 0
        assert shown.get_by_role("button", name="Delete").count() == 0
        config = shown.evaluate("window.gradio_config")
        buttons = {one["props"].get("value") for one in config["components"] if one["type"] == "button"}
        assert {"Layout", "Compare", "metrics.csv"} <= buttons
        assert not buttons & {
            "Stop and save",
            "Kill",
            "Delete",
            "Resume",
            "Clone",
            "Remove from the queue",
            "Start again",
            "Save",
        }
        shown.close()  # or it would ask an app that is gone
    finally:
        app.end()
