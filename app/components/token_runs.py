"""A row of data as HTML: its runs of tokens, with and without loss, truncated ones struck through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

SHOWN = 4_000
"""Most characters of a run of tokens that are shown."""


def token_runs(examples: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as `nnxdsl data --json` has them; the parts of a row stand beside each other, all text escaped."""
    rows = "".join(
        f"<section><b>{escape(str(example['row']))}</b>"
        f'<div class="parts">{"".join(map(_run, example["runs"]))}</div></section>'
        for example in examples
    )
    return f'<div class="token-runs">{rows}</div>'


def _run(run: Mapping[str, Any]) -> str:
    kind, name = ("truncated",) * 2 if run["cut"] else ("loss",) * 2 if run["loss"] else ("plain", "no loss")
    text, count = str(run["text"]), int(run["tokens"])
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text) - SHOWN:,} more characters)"
    what = f"{run['part']}, {name}, {count:,} {'token' if count == 1 else 'tokens'}"
    lines = escape(shown).replace("\n", "↵\n")
    return f'<div class="{kind}"><span class="what">{escape(what)}</span><pre>{lines}</pre></div>'
