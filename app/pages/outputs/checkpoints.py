"""The All checkpoints tab: one prompt, answered by the policy of every checkpoint of a run."""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr
import pandas as pd

from ...processes.outputs_worker import Request
from ...state import Site
from ...view import Query, Values, View
from .forms import SAMPLER, Form, number_fields, prompt_fields
from .generate import ended
from .request import Chosen


class Checkpoints:
    """Components of the tab."""

    def __init__(self, site: Site, view: View) -> None:
        """Adds the components."""
        with gr.Group():
            fields = prompt_fields()
            fields |= number_fields(
                ("max", "Max new tokens", f"At most {site.settings.limits.new_tokens:,}"),
                *SAMPLER,
                ("seed", "Seed", "The same for all checkpoints"),
            )
        self.form = Form(site, view, "checkpoints", "Generate with each", fields)
        with gr.Column(visible=False) as self.found:
            self._table = gr.Dataframe(interactive=False, wrap=True, max_height=700, column_widths=[90, 780, 100, 230])
        self.outputs = [self.found, self._table]

    def values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """The answers that there are."""
        rows: list[list[object]] = []
        for one in requests:
            assert one.result is not None
            answer = one.result["policy"]
            rows.append([one.model.step, answer["text"], answer["tokens"], ended(answer)])
        table = pd.DataFrame(rows, columns=["step", "answer", "tokens", "end"])
        label = f"Answers of {len(rows)} of {len(here.models)} checkpoints; step 0 is the policy before training"
        return {self.found: gr.update(visible=True), self._table: gr.update(value=table, label=label)}
