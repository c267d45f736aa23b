"""Endpoints for programs, with types and docs: the same actions as the pages'.

    client = gradio_client.Client("http://127.0.0.1:7860", headers={"Authorization": f"Bearer {token}"})
    client.predict(api_name="/runs")

`client.view_api()` lists them. In a read-only app, those that start, stop or compute do not exist.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import time
from collections.abc import Callable
from typing import Any

import gradio as gr

from nnxdsl.errors import NnxdslError, RunError

from .pages.layout.request import NO_DEVICE, device_of, plan_job
from .pages.outputs.request import request as outputs_request
from .pages.outputs.request import steps_of
from .processes.outputs_worker import Model
from .state import Site
from .store.experiments import from_text
from .store.index import Row
from .store.series import thinned
from .view import client_of

POLL_SECONDS = 0.1


def add(site: Site) -> None:
    """Adds the endpoints to the app that is being built."""
    endpoints = Endpoints(site)
    functions: list[Callable[..., Any]] = [endpoints.runs, endpoints.metrics]
    if not site.settings.read_only:
        functions += [endpoints.plan, endpoints.launch, endpoints.stop, endpoints.outputs]
    for function in functions:
        gr.api(_told(function), api_name=function.__name__, concurrency_limit=None)


class Endpoints:
    """The endpoints; an `NnxdslError` reaches the client as an error with its message."""

    def __init__(self, site: Site) -> None:
        """Keeps the state of the app."""
        self._site = site

    def runs(self) -> list[dict[str, Any]]:
        """List all runs, newest first: id, state, step, total, tags, facts (objective, model, ...), last metrics."""
        return [self._summary(row) for row in self._site.index.rows()]

    def _summary(self, row: Row) -> dict[str, Any]:
        return {
            "id": row.id,
            "state": row.state,
            "step": row.status.get("step"),
            "total": row.status.get("total"),
            "created": row.created,
            "tags": list(self._site.tags.of(row.id)),
            **row.facts,
            "metrics": dict(row.metrics),
        }

    def metrics(self, run: str, points: int = 1000) -> dict[str, dict[str, list[float | None]]]:
        """Return the steps and values of each metric, thinned to about so many points; NaN and infinity are None."""
        if points < 2:
            raise RunError(f"points: expected a value > 1, got {points}")
        columns = self._site.series.of(self._site.run(run).path / "metrics.jsonl").columns
        found: dict[str, dict[str, list[float | None]]] = {}
        for name, column in list(columns.items()):
            steps, values = thinned(*column.arrays(), points)
            finite = [float(value) if math.isfinite(value) else None for value in values]
            found[name] = {"steps": steps.tolist(), "values": finite}
        return found

    def plan(self, experiment: str, device: str = "") -> str:
        """Plan an experiment, given as Python or JSON, on a device such as h100; return the JSON of `nnxdsl plan`."""
        name = device_of({"device": device}) or NO_DEVICE
        job = plan_job(self._site, from_text(experiment), name, start=True)
        assert job is not None
        while not job.is_over:
            time.sleep(POLL_SECONDS)
        if job.result is None:
            raise RunError(job.error or f"the plan was {job.state}")
        return json.dumps(job.result)  # as text, since gradio_client takes any object with a `path` for a file

    def launch(self, request: gr.Request, experiment: str, queued: bool = False) -> str:
        """Launch an experiment, given as Python or JSON, or put it into the queue; return the id of its run."""
        found = from_text(experiment)
        start = self._site.launcher.enqueue if queued else self._site.launcher.launch
        start(found, client_of(request))
        return found.id

    def stop(self, request: gr.Request, run: str) -> str:
        """Ask a run to save a checkpoint and stop; return what was done."""
        return self._site.launcher.stop(run, client_of(request))

    def outputs(
        self,
        run: str,
        prompt: str,
        step: int = -1,
        against: str = "reference",
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Return the answers of a run's policy and of what it is compared with to a prompt.

        Without `step` the newest checkpoint answers. `against` is "reference", another step, or RUN@STEP.
        """
        steps = [*steps_of(self._site.run(run).path), 0]
        if step >= 0 and step not in steps:
            raise RunError(f"step: {run} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}")
        query = {"prompt": prompt, "max": str(max_new_tokens), "temperature": str(temperature), "seed": str(seed)}
        given = outputs_request(self._site, "generate", query)
        if given is None:
            raise RunError("prompt: is empty")
        found = self._site.answers.ask(Model(run, steps[0] if step < 0 else step, against), given)
        while not found.is_over:
            time.sleep(POLL_SECONDS)
        if found.result is None:
            raise RunError(found.error or f"the request was {found.state}")
        return found.result


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NnxdslError as error:
            raise gr.Error(str(error), print_exception=False) from None

    # gradio reads types from the function itself, where they are still text.
    call.__annotations__ = inspect.get_annotations(function, eval_str=True)
    return call
