"""The endpoints for programs, called by gradio's own client over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import to_json
from tests.app.conftest import RunningApp
from tests.app.many import experiment, write_run
from tests.waiting import HANG_SECONDS, wait_until

client_module = pytest.importorskip("gradio_client")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.browser  # as all that starts the app in a process of its own

READING = {"/runs", "/metrics"}
WRITING = {"/plan", "/launch", "/stop", "/outputs"}


def client_of(app: RunningApp, token: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {app.token if token is None else token}"}
    return client_module.Client(app.url(), headers=headers, verbose=False, analytics_enabled=False)


@pytest.fixture
def read_only(project: Path, environment: dict[str, str]) -> Iterator[RunningApp]:
    app = RunningApp(project, environment, ("--read-only",))
    app.start()
    yield app
    app.end()


def test_runs_and_metrics_are_read(emptied_app: RunningApp) -> None:
    run = write_run(emptied_app.home, experiment(0), "finished", 30)
    client = client_of(emptied_app)
    (actual,) = client.predict(api_name="/runs")
    assert (actual["id"], actual["state"], actual["objective"]) == (run.name, "finished", "DPO")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = client.predict(run=run.name, api_name="/metrics")
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert dict(zip(metrics["loss"]["steps"], metrics["loss"]["values"], strict=True)) == pytest.approx(losses)
    for wrong in (f"../{run.name}", str(run), "gone", ""):
        with pytest.raises(client_module.exceptions.AppError, match=r"there is no run|name a run|not a run id"):
            client.predict(run=wrong, api_name="/metrics")


def test_an_experiment_is_planned_launched_and_asked(emptied_app: RunningApp) -> None:
    client = client_of(emptied_app)
    inputs = emptied_app.project / "experiments" / "tiny.py"
    text = "\n".join(
        line for line in inputs.read_text().splitlines() if not line.startswith(("if ", "    experiment."))
    )
    plan = json.loads(client.predict(experiment=text, device="h100", api_name="/plan"))
    run = client.predict(experiment=text, api_name="/launch")
    assert run == plan["id"]

    def is_finished() -> bool:
        return {one["id"]: one["state"] for one in client.predict(api_name="/runs")}.get(run) == "finished"

    wait_until(is_finished, every_seconds=1)
    answers = client.predict(run=run, prompt="Say 3: ", max_new_tokens=4, api_name="/outputs")
    assert answers["run"] == run
    assert len(answers["policy"]["ids"]) <= 4
    with pytest.raises(client_module.exceptions.AppError, match="no checkpoint of step 999"):
        client.predict(run=run, prompt="Say 3: ", step=999, api_name="/outputs")
    with pytest.raises(client_module.exceptions.AppError, match="has finished"):
        client.predict(experiment=text, api_name="/launch")


def test_an_app_that_is_ended_ends_what_a_request_waits_for(project: Path, environment: dict[str, str]) -> None:
    app = RunningApp(project, environment)
    app.start()
    assert app.child is not None
    child, begun = psutil.Process(app.child.pid), []
    waiting = client_of(app).submit(experiment=to_json(experiment(0)), device="h100", api_name="/plan")
    wait_until(lambda: begun.extend(child.children(recursive=True)) or begun)
    begun[0].suspend()  # so that it never ends by itself
    assert app.end() == 0
    assert not any(one.is_running() for one in begun)
    assert isinstance(waiting.exception(HANG_SECONDS), Exception)


def test_what_is_wrong_is_refused(emptied_app: RunningApp) -> None:
    client = client_of(emptied_app)
    for text, message in (
        ("Experiment(stps=3)", "plain constructor calls only"),
        ("__import__('os').system('true')", r"expected|only"),
        ("{", "JSON"),
        ("", "paste the Python"),
    ):
        with pytest.raises(client_module.exceptions.AppError, match=message):
            client.predict(experiment=text, api_name="/launch")
    with pytest.raises(client_module.exceptions.AppError, match="not a run id"):
        client.predict(run="../x", api_name="/stop")
    inputs = experiment(5)
    assert client.predict(experiment=to_json(inputs), queued=True, api_name="/launch") == inputs.id
    audit = [json.loads(line) for line in (emptied_app.home / ".app" / "audit.jsonl").read_text().splitlines()]
    assert ("queue", inputs.id) in [(one["action"], one["run"]) for one in audit]


def test_endpoints_are_described(shared_app: RunningApp) -> None:
    endpoints = client_of(shared_app).view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(endpoints) == READING | WRITING
    assert [one["parameter_name"] for one in endpoints["/launch"]["parameters"]] == ["experiment", "queued"]
    assert all(one["description"] for one in endpoints.values())


def test_a_read_only_app_has_no_endpoint_that_writes(read_only: RunningApp) -> None:
    assert set(client_of(read_only).view_api(return_format="dict", print_info=False)["named_endpoints"]) == READING


def test_nothing_is_called_without_the_token(shared_app: RunningApp) -> None:
    with pytest.raises(Exception, match="credentials were not provided"):
        client_of(shared_app, token="wrong")
