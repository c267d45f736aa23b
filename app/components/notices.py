"""Notices of alerts, on every page; a tab remembers which of them it has shown."""

from __future__ import annotations

import gradio as gr

from ..markup import link, tag
from ..processes.alerts import CHECK_SECONDS, Alerts
from ..view import UNQUEUED

MOST = 4  # alerts that are shown at a time; of others their number


def add(alerts: Alerts, root: str) -> None:
    """Adds a timer, which gradio stops while the page is hidden, to a page of an app with a root path."""
    span = gr.Textbox(visible="hidden", label="alerts")

    def check(seen: str) -> object:
        """Which alerts are new to the tab, as `first:end`; notices need gradio's queue, and this goes without."""
        end = len(alerts.all())
        first = min(int(seen), end) if seen.isdecimal() and len(seen) < 10 else end  # a new tab is shown none
        return gr.skip() if seen == str(end) else f"{first}:{end}"

    def show(text: str) -> None:
        first, _, end = text.partition(":")
        if not (first.isdecimal() and end.isdecimal()):
            return
        new = alerts.all()[int(first[:9]) : int(end[:9])]
        if len(new) > MOST:
            gr.Warning(f"{len(new) - MOST} earlier alerts are not shown.", title="Alerts")
        for alert in new[-MOST:]:
            notice = gr.Info if alert.kind == "finished" else gr.Warning
            notice(tag("a", alert.text, href=f"{root}{link('/run', id=alert.run)}"), title=TITLES[alert.kind])

    for trigger in (gr.context.Context.root_block.load, gr.Timer(CHECK_SECONDS).tick):  # type: ignore[union-attr]
        trigger(check, [span], [span], js="() => sessionStorage.nnxAlerts ?? ''", **UNQUEUED)
    seen = "(span) => { sessionStorage.nnxAlerts = span.split(':')[1] ?? ''; return span; }"
    span.change(show, [span], None, js=seen, show_progress="hidden", concurrency_limit=None, api_visibility="private")


TITLES = {
    "non_finite": "NaN or infinite metrics",
    "stalled": "Run is stalled",
    "lost": "Run was lost",
    "failed": "Run failed",
    "finished": "Run finished",
}
