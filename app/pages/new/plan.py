"""The plan of a draft, computed by a child process, for this machine or another device."""

from __future__ import annotations

from nnxdsl.config.experiment import Experiment

from ...html import Html, join, link, tag
from ...page import Ask
from ...processes.jobs import Job
from ...state import Site
from ..layout.compile import verified
from ..layout.plan_words import plan_words
from ..layout.request import NO_DEVICE, plan_job

DEVICES = ("", "cpu", "h200", "h100", "a100", "b200", "v5e", "v5p", "v6e")


def planned(site: Site, experiment: Experiment, ask: Ask, *, start: bool) -> Job | None:
    """Returns the job that plans an experiment for the query's device; None before it was started."""
    device = device_of(ask) or NO_DEVICE
    found = plan_job(site, experiment, device, start=False)
    if not start or (found is not None and found.state != "failed"):
        return found
    return plan_job(site, experiment, device, start=True)


def device_of(ask: Ask) -> str:
    """Device of the query; empty for this machine's."""
    device = ask.query.get("device", "")
    return device if device in DEVICES else ""


def plan_tab(site: Site, ask: Ask, experiment: Experiment) -> Html:
    """Returns the plan when it is ready, and XLA's report on it."""
    device = device_of(ask)
    options = [tag("option", name or "this machine", value=name, selected=name == device) for name in DEVICES]
    chooser = tag("form", tag("label", "For ", tag("select", options, name="device")), data_query=True, cls="row")
    job = planned(site, experiment, ask, start=True)
    bar = tag(
        "div",
        chooser,
        tag("a", "Inspect the layout", href=link("/layout", draft=ask.query.get("draft")), cls="button small"),
        cls="row between",
    )
    assert job is not None
    if not job.is_over:
        words = f"Planning in a child process, {job.seconds:.0f} s so far ..."
        return join(bar, tag("p", words, cls="muted", data_tick="0.7"))
    if job.state != "done":
        return join(bar, tag("pre", job.error or job.state, cls="error", role="alert"))
    checked = verified(site, experiment, device or NO_DEVICE, "new")
    return join(bar, plan_words(job.result), checked)
