"""The state of a run as words and a sign, and its progress: colour is never the only indicator."""

from __future__ import annotations

from ..markup import Html, tag

SIGNS = {
    "queued": "◷", "starting": "◌", "compiling": "◌", "running": "▶", "stopping": "◼", "silent": "?",
    "stopped": "◼", "finished": "✔", "failed": "✘", "lost": "✘", "refused": "✘", "damaged": "!",
    "missing": "✘",
}  # fmt: skip


def signed(state: str) -> str:
    """A state with its sign.

    >>> signed("finished")
    '✔ finished'
    """
    return f"{SIGNS.get(state, '·')} {state}"


def badge(state: str, run: str) -> Html:
    """A state in its colour, which screen readers announce when it changes."""
    shown_state = {"refused": "failed"}.get(state, state)
    spoken = tag("span", f"{run} is ", cls="visually-hidden")
    return tag("div", spoken, tag("span", signed(state), cls=f"badge {shown_state}"), role="status", cls="state")
