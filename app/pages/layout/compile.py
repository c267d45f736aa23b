"""Ahead-of-time compilation of a step: its button, progress and report."""

from __future__ import annotations

from nnxdsl.config.experiment import Experiment

from ...components.parts import action
from ...html import Child, Html, tag
from ...state import Site
from . import views as layout_views
from .request import plan_job, why_not_compiled


def verified(site: Site, experiment: Experiment, device: str, page: str) -> Html:
    """Returns XLA's report, the progress of the compilation, or a button that starts it.

    Args:
        site: State of the app.
        experiment: The experiment with its mesh.
        device: Name in the catalogue, or `NO_DEVICE`.
        page: Name of the page whose actions `verify` and `cancel` are called.
    """
    job = plan_job(site, experiment, device, start=False, compiled=True)
    why = why_not_compiled(experiment, device)
    about = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
    body: Child
    if job is not None and job.state == "done":
        body = layout_views.compiled(job.result)
    elif job is not None and not job.is_over:
        body = (
            tag("p", f"Compiling in a child process, {job.seconds:.0f} s so far ...", cls="muted", data_tick="1"),
            tag("div", action("Cancel", f"{page}.cancel"), cls="row"),
        )
    elif why is not None:
        body = tag("p", why, cls="muted")
    elif site.settings.read_only:
        body = tag("p", "This app is read-only; use `nnxdsl plan --compile` in a terminal.", cls="muted")
    else:
        wrong = tag("pre", job.error, cls="error", role="alert") if job is not None and job.error else None
        body = (
            wrong,
            tag(
                "div", action("Verify by compiling", f"{page}.verify"), tag("span", about, cls="muted small"), cls="row"
            ),
        )
    return tag("section", tag("h2", "Compiler check"), body, cls="panel")
