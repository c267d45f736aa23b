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

from .client import CLIENT
from .pages.layout.request import NO_DEVICE, device_of, plan_job
from .pages.outputs.request import request as outputs_request
from .pages.outputs.request import steps_of
from .processes.jobs import Job
from .processes.outputs_worker import Model, Request
from .state import Site
from .store.experiments import from_text
from .store.series import thinned
from .view import client_of

POLL_SECONDS = 0.1


def add(site: Site) -> None:
    """Adds the endpoints to the app that is being built."""

    def runs() -> list[dict[str, Any]]:
        """List all runs, newest first: id, state, step, total, tags, facts (objective, model, ...), last metrics."""
        return [
            {
                "id": row.id,
                "state": row.state,
                "step": row.status.get("step"),
                "total": row.status.get("total"),
                "created": row.created,
                "tags": list(site.tags.of(row.id)),
                **row.facts,
                "metrics": dict(row.metrics),
            }
            for row in site.index.rows()
        ]

    def metrics(run: str, points: int = 1000) -> dict[str, dict[str, list[float | None]]]:
        """Return the steps and values of each metric, thinned to about so many points; NaN and infinity are None."""
        if points < 2:
            raise RunError(f"points: expected a value > 1, got {points}")
        columns = site.series.of(site.run(run).path / "metrics.jsonl").columns
        by_run: dict[str, dict[str, list[float | None]]] = {}
        for name, column in list(columns.items()):
            steps, values = thinned(*column.arrays(), points)
            finite = [float(value) if math.isfinite(value) else None for value in values]
            by_run[name] = {"steps": steps.tolist(), "values": finite}
        return by_run

    def plan(experiment: str, device: str = "") -> str:
        """Plan an experiment, given as Python or JSON, on a device such as h100; return the JSON of `nnxdsl plan`."""
        name = device_of({"device": device}) or NO_DEVICE
        job = plan_job(site, from_text(experiment), name, start=True)
        assert job is not None
        return json.dumps(_result(job))  # as text, since gradio_client takes any object with a `path` for a file

    def launch(request: gr.Request, experiment: str, queued: bool = False) -> str:
        """Launch an experiment, given as Python or JSON, or put it into the queue; return the id of its run."""
        parsed = from_text(experiment)
        start = site.launcher.enqueue if queued else site.launcher.launch
        CLIENT.set(client_of(request))
        start(parsed)
        return parsed.id

    def stop(request: gr.Request, run: str) -> str:
        """Ask a run to save a checkpoint and stop; return what was done."""
        CLIENT.set(client_of(request))
        return site.launcher.stop(run)

    def outputs(
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
        steps = [*steps_of(site.run(run).path), 0]
        if step >= 0 and step not in steps:
            raise RunError(f"step: {run} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}")
        query = {"prompt": prompt, "max": str(max_new_tokens), "temperature": str(temperature), "seed": str(seed)}
        request = outputs_request(site, "generate", query)
        if request is None:
            raise RunError("prompt: is empty")
        return _result(site.answers.ask(Model(run, steps[0] if step < 0 else step, against), request))

    for function in (runs, metrics) if site.settings.read_only else (runs, metrics, plan, launch, stop, outputs):
        gr.api(_described(function), api_name=function.__name__, concurrency_limit=None)


def _result(job: Job | Request) -> Any:
    """What a child process computes, once it is there."""
    while not job.is_over:
        time.sleep(POLL_SECONDS)
    if job.result is None:
        raise RunError(job.error or f"the request was {job.state}")
    return job.result


def _described(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose `NnxdslError` reaches the client as an error with its message."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NnxdslError as error:
            raise gr.Error(str(error), print_exception=False) from None

    # gradio reads types from the function itself, where they are still text.
    call.__annotations__ = inspect.get_annotations(function, eval_str=True)
    return call
