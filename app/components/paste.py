"""A text box for an experiment as Python or JSON, pasted or read from a file by the browser."""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr

from ..view import UNQUEUED, Done, Query, View

FILE = '<label>or read a file <input type="file" accept=".py,.json,.txt"></label>'
READ = """element.querySelector("input").onchange = async ({ target: { files } }) => {
  if (!files.length) return;
  nnx.read = await files[0].slice(0, 1000000).text();
  trigger("change");
};"""


def paste(view: View, button: str, act: Callable[[Query, str], Done | None]) -> None:
    """Adds the box, and a button that calls a function with the query and the text."""
    text = gr.Textbox(
        label="Python or JSON",
        info="Python as `nnxdsl show FILE --python` prints it, or JSON. It is parsed, never executed.",
        lines=8,
        max_lines=20,
        placeholder="from nnxdsl import ...\n\nexperiment = Experiment(...)",
    )
    file = gr.HTML(FILE, js_on_load=READ)
    file.change(None, None, [text], js="() => nnx.read", **UNQUEUED)
    view.button(button, act, [text], variant="primary", min_width=120)
