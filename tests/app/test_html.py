"""Nothing that a run supplied becomes markup."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import gradio as gr
import pytest

from app import formatting, markup
from app.components import states
from app.markup import Html, join, link, tag
from app.pages import runs as runs_page
from app.pages.run import page as run_page
from app.settings import Settings
from app.state import Site
from nnxdsl.runs.run_dir import RunDirectory
from tests.app import native
from tests.app.many import experiment, write_run
from tests.app.on_native import asked, offered

EVIL = '<img src=x onerror="alert(1)">${alert(2)}{{alert(3)}}'


@pytest.fixture
def site(tmp_path: Path):
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


@pytest.mark.parametrize("module", [markup, formatting, states])
def test_examples_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_text_is_escaped_everywhere() -> None:
    assert "<img" not in tag("p", EVIL, [EVIL, (EVIL,)], title=EVIL, data_x={"a": EVIL})
    assert "<img" not in join(EVIL, EVIL, sep=EVIL)
    assert '"' not in link("/run", id=EVIL)
    assert tag("p", tag("b", "x")) == "<p><b>x</b></p>"
    assert isinstance(join("a"), Html)


@pytest.mark.parametrize("tab", ["charts", "log", "config", "samples", "environment", "events"])
def test_a_runs_own_words_are_text_on_every_page(site: Site, tab: str) -> None:
    path = write_run(site.settings.home, experiment(0, notes=EVIL), "failed", 5, error=EVIL, stage=EVIL)
    run = RunDirectory(path)
    run.append_sample({"step": 4, "prompt": EVIL, "policy": EVIL, "reference": EVIL})
    run.append_event({"event": EVIL, EVIL: EVIL})
    run.append_attempt({"time": EVIL, "argv": [EVIL], "cwd": EVIL, "devices": [EVIL], "git": {"commit": EVIL}})
    run.log.write_text(f"2026-01-01T00:00:00+00:00  {EVIL}\nValueError: {EVIL}\n")
    run.append_metrics({"step": 9, EVIL: 1.0})
    ours = native.Built(run_page.Run, site)
    assert ours.shown(id=path.name, tab=tab)["Code"] == EVIL  # CodeMirror shows it as it is
    for built, query in (
        (ours, {"id": path.name, "tab": tab, "all": "1"}),
        (ours, {"id": EVIL}),
        (runs(site), {"q": EVIL}),
    ):
        load = built.handler("load")
        values = load.fn("{}", asked(query), "{}")
        for component, value in zip(load.outputs, values, strict=True):
            text = value.get("value") if isinstance(value, dict) else value
            if isinstance(component, gr.Markdown | gr.HTML):
                assert "<img" not in str(text or "")
            if isinstance(component, gr.Dataframe):
                assert component.datatype == "str"
            if isinstance(component, gr.Plot) and text is not None:
                assert "<img" not in str(text.to_dict())


def runs(site: Site) -> native.Built:
    return native.Built(runs_page.Runs, site)


@pytest.mark.parametrize("query", [{"id": EVIL}, {"id": "../etc"}, {"id": ".app"}, {"id": "x/../y"}, {}])
def test_names_that_are_none_lead_nowhere(site: Site, query: dict[str, str]) -> None:
    built = native.Built(run_page.Run, site)
    shown = "".join(map(str, built.shown(**query).values()))
    assert "<img" not in shown
    assert "Choose one" in shown or "There is no run" in shown
    assert offered(built, **query) == {}
