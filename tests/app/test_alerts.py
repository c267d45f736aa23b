"""Alerts on runs: what is one, that each comes once, and how it gets to pages, a command and a webhook."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.command import add_arguments, settings_of
from app.processes import alert_sender
from app.processes import alerts as alerts_module
from app.processes.alert_sender import AlertSender
from app.processes.alerts import Alert, Alerts
from app.settings import Settings
from app.store.index import Index
from nnxdsl import RunError
from nnxdsl.storage import process_info
from tests.app.conftest import RunningApp
from tests.app.many import experiment, write_run
from tests.waiting import HANG_SECONDS, wait_until

SKIPPED = {"__type__": "update"}
"""What gradio leaves as it is."""
Received = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks at every call, and twenty times a second by a thread."""
    monkeypatch.setattr(alerts_module, "CHECK_SECONDS", 0.05)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def webhook() -> Iterator[tuple[str, Received]]:
    """An HTTP server, and what it was sent: it redirects /redirect, and refuses /refuse."""
    received: Received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            received.append((self.path, json.loads(body)))
            self.send_response({"/redirect": 302, "/refuse": 500}.get(self.path.partition("?")[0], 204))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            received.append((self.path, {}))
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process


def alerts_of(home: Path, **settings: Any) -> Alerts:
    return Alerts(Settings(home=home, project=home.parent, **settings), Index(home))


def sending(home: Path, **settings: Any) -> AlertSender:
    return AlertSender(Settings(home=home, project=home.parent, **settings), alerts_of(home, **settings))


def live_run(home: Path, number: int, process: subprocess.Popen[Any] | None = None, **status: object) -> Path:
    """A run in its first attempt, of a process: this one, if none is given."""
    pid = os.getpid() if process is None else process.pid
    writer = {"pid": pid, "pid_started": process_info.started(pid), "host": process_info.hostname()}
    return write_run(home, experiment(number), "running", 40, **{"attempt": 1, "stage": "training", **writer, **status})


def change(run: Path, **status: object) -> None:
    file = run / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "heartbeat": process_info.clock(), **status}))


def add_row(run: Path, **row: object) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def finish(run: Path) -> None:
    add_row(run, step=99, attempt=1, loss=0.1)  # a run whose metrics end before is lost
    change(run, state="finished", step=100)


def printed(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What was printed until these words were."""
    texts: list[str] = []
    wait_until(lambda: texts.append(capsys.readouterr().err) or text in "".join(texts))
    return "".join(texts)


def kinds(result: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.run, alert.kind) for alert in result]


def test_each_alert_comes_once_also_after_a_restart(home: Path) -> None:
    write_run(home, experiment(0), "finished", 5)
    write_run(home, experiment(1), "failed", 5, error="RunError: no")
    run, other = live_run(home, 2), live_run(home, 3)
    alerts = alerts_of(home)
    assert alerts.all() == []
    add_row(run, step=40, attempt=1, loss=math.nan, grad_norm=math.inf, **{"rewards/margins": 0.5})
    time.sleep(0.06)
    (alert,) = alerts.all()
    assert (alert.run, alert.kind, alert.attempt, alert.step) == (run.name, "non_finite", 1, 40)
    assert alert.text == f"{run.name} has metrics that are NaN or infinite since step 40: loss, grad_norm"
    assert alert.directory == str(run)
    add_row(run, step=41, attempt=1, loss=math.nan)
    change(run, state="failed", error="TrainingError: step 40: loss is nan")
    time.sleep(0.06)
    assert kinds(alerts.all()) == [(run.name, "non_finite"), (run.name, "failed")]
    assert alerts.all()[-1].text == f"{run.name} failed: TrainingError: step 40: loss is nan"
    finish(other)  # while no app runs
    again = alerts_of(home)
    assert kinds(again.all()) == [(run.name, "non_finite"), (run.name, "failed"), (other.name, "finished")]
    time.sleep(0.06)
    assert again.all() == alerts.all()
    change(run, state="running", attempt=2)
    add_row(run, step=41, attempt=2, loss=math.nan)
    time.sleep(0.06)
    assert kinds(again.all())[3:] == [(run.name, "non_finite")]
    assert again.all()[-1].attempt == 2
    assert {path.name for path in run.iterdir()} == {path.name for path in other.iterdir()}  # nothing is written there


def test_a_run_without_steps_is_stalled_and_one_without_process_is_lost(
    home: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_module, "STALL_SECONDS", 0.5)
    run = live_run(home, 0, process)
    evaluates, trains, slow = live_run(home, 1, stage="evaluating"), live_run(home, 2), live_run(home, 3)
    rows = [json.loads(line) | {"tokens/s": 4.0} for line in (slow / "metrics.jsonl").read_text().splitlines()]
    (slow / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alerts, steps, actual = alerts_of(home), itertools.count(41), list[Alert]()

    def checked() -> list[Alert]:
        """The alerts of a check before which one run has made a step."""
        add_row(trains, step=next(steps), attempt=1, loss=0.5)
        actual[:] = alerts.all()
        return actual

    wait_until(checked)
    (alert,) = actual
    assert (alert.run, alert.kind) == (run.name, "stalled")
    # 400 tokens a step at 5,000 to 5,500 tokens per second
    text = rf"{run.name} is stalled: no step for \d+ s after step 40, where 0\.07\d+ s is usual"
    assert re.fullmatch(text, alert.text)
    monkeypatch.setattr(alerts_module, "STALL_SECONDS", HANG_SECONDS)
    process.kill()
    process.wait()
    time.sleep(0.06)
    assert kinds(alerts.all()) == [(run.name, "stalled"), (run.name, "lost")]
    change(evaluates, heartbeat={**process_info.clock(), "monotonic": 0.0, "wall": 0.0})
    time.sleep(0.06)
    assert kinds(alerts.all())[2:] == [(evaluates.name, "stalled")]


def test_a_webhook_gets_each_alert_as_json(
    home: Path, webhook: tuple[str, Received], capsys: pytest.CaptureFixture[str]
) -> None:
    url, received = webhook
    run = live_run(home, 0)
    alerts = sending(home, alert_webhook=f"{url}/hook?key=secret")
    finish(run)
    wait_until(lambda: received)
    alerts.close()
    ((path, alert),) = received
    assert path == "/hook?key=secret"
    assert {name: alert[name] for name in ("kind", "run", "attempt", "step", "text", "directory")} == {
        "kind": "finished",
        "run": run.name,
        "attempt": 1,
        "step": 100,
        "text": f"{run.name} finished at step 100",
        "directory": str(run),
    }
    for number, path in enumerate(("redirect", "refuse"), start=1):
        run = live_run(home, number)
        alerts = sending(home, alert_webhook=f"{url}/{path}?key=secret")
        change(run, state="failed", error="x")
        line = printed(capsys, "HTTP Error")
        assert f"failed of {run.name} was not sent" in line
        assert "secret" not in line
        alerts.close()
    assert [path.partition("?")[0] for path, _ in received] == ["/hook", "/redirect", "/refuse"]
    server = live_run(home, 3)
    alerts = sending(home, alert_webhook="http://127.0.0.1:1/?key=secret")  # nothing listens there
    finish(server)
    assert "secret" not in printed(capsys, f"finished of {server.name} was not sent")
    alerts.close()


def test_a_command_reads_each_alert_and_cannot_hold_up_the_app(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = home.parent / "tell.py"
    script.write_text(
        "import json, os, subprocess, sys, time\n"
        "alert = json.load(sys.stdin)\n"
        "open('told.jsonl', 'a').write(json.dumps({**alert, 'words': sys.argv[1:]}) + chr(10))\n"
        "assert 'NNXDSL_APP_TOKEN' not in os.environ\n"
        "if alert['kind'] == 'finished': sys.exit('no such channel')\n"
        "if alert['kind'] == 'failed':\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    open('child', 'w').write(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("NNXDSL_APP_TOKEN", "x" * 20)
    monkeypatch.setattr(alert_sender, "SEND_SECONDS", HANG_SECONDS)
    runs = [live_run(home, number) for number in range(3)]
    alerts = sending(home, alert_command=(sys.executable, str(script), "a b; c"))
    began = time.monotonic()
    finish(runs[0])
    problem = "ended with exit code 1: no such channel"
    printed(capsys, f"finished of {runs[0].name} was not sent: {sys.executable} {problem}")
    limit = round(1 + 5 * (time.monotonic() - began), 1)  # by what starting the command takes here
    monkeypatch.setattr(alert_sender, "SEND_SECONDS", limit)
    change(runs[1], state="failed")
    problem = f"did not end within {limit:g} s and was killed"
    printed(capsys, f"failed of {runs[1].name} was not sent: {sys.executable} {problem}")
    add_row(runs[2], step=41, attempt=1, loss=math.nan)  # and it goes on
    file = home.parent / "told.jsonl"
    wait_until(lambda: file.read_text().count("\n") == 3)
    alerts.close()
    reported = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["kind"], one["run"]) for one in reported] == [
        ("finished", runs[0].name),
        ("failed", runs[1].name),
        ("non_finite", runs[2].name),
    ]
    assert all(one["words"] == ["a b; c"] for one in reported)
    pid = int((home.parent / "child").read_text())
    wait_until(lambda: not process_info.is_alive(pid, process_info.started(pid)))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--alert-command", "echo 'x"), "--alert-command echo 'x: No closing quotation"),
        (("--alert-command", "no-such-command x"), "--alert-command no-such-command x: expected a command that can be"),
        (("--alert-command", ""), "--alert-command : expected a command that can be"),
        (("--alert-webhook", "file:///etc/passwd"), "--alert-webhook: expected a URL such as"),
        (("--alert-webhook", "https://me:secret@lab.example"), "--alert-webhook: expected a URL such as"),
        (("--alert-webhook", "http://lab.example:port/"), "--alert-webhook: Port could not be cast"),
    ],
)
def test_what_cannot_be_sent_to_is_refused(argv: tuple[str, ...], problem: str) -> None:
    with pytest.raises(RunError, match=f"^{re.escape(problem)}") as refused:
        settings_of(arguments(*argv))
    assert "secret" not in str(refused.value)


def test_only_whoever_starts_the_app_sets_command_and_webhook() -> None:
    settings = settings_of(arguments("--alert-command", "echo 'a b' $HOME", "--alert-webhook", "https://x.example/key"))
    assert settings.alert_command == ("echo", "a b", "$HOME")
    assert settings.alert_webhook == "https://x.example/key"
    assert "key" not in repr(settings)


def arguments(*argv: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_a_tab_shows_what_is_new_to_it(site: Any, recwarn: pytest.WarningsRecorder) -> None:
    native, notices = pytest.importorskip("tests.app.native"), pytest.importorskip("app.components.notices")
    site.settings.home.mkdir(exist_ok=True)
    run = live_run(site.settings.home, 0)
    site.alerts.all()
    built = native.Built(lambda site: notices.add(site.alerts, "/root"), site)
    calls = {kind: built.handler(kind).fn for kind in ("load", "tick", "change")}
    assert calls["load"]("") == "0:0"
    assert calls["tick"]("0") == SKIPPED
    add_row(run, step=40, attempt=1, loss=math.nan)
    time.sleep(0.06)
    assert calls["load"]("") == "1:1"  # a new tab
    assert calls["tick"]("0") == "0:1"
    assert calls["tick"]("1") == SKIPPED
    calls["change"]("0:1")
    (notice,) = recwarn.list
    assert str(notice.message).startswith(f'<a href="/root/run?id={run.name}">{run.name} has metrics that are NaN')
    for wrong in ("", "x", "-1:2", "1", "9:1", "٣:٤"):
        calls["change"](wrong)
        assert calls["tick"](wrong) in ("1:1", SKIPPED)
    assert len(recwarn.list) == 1


@pytest.mark.slow
def test_runs_that_go_nan_are_killed_and_finish(
    project: Path, environment: dict[str, str], webhook: tuple[str, Received]
) -> None:
    url, received = webhook
    command = f"{sys.executable} -c \"import sys; open('told.jsonl', 'a').write(sys.stdin.read() + chr(10))\""
    app = RunningApp(project, environment, ("--alert-webhook", url, "--alert-command", command))
    app.start()
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for number, arguments in enumerate((("steps=6",), ("optimizer.schedule.lr=1e30",), ("steps=100000",))):
            argv = [sys.executable, "experiments/tiny.py", "run", f"seed={number}", *arguments]
            begun.append(
                subprocess.Popen(
                    argv, cwd=project, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        wait_until(lambda: len(runs_by_seed(app.home)) == 3)
        runs = runs_by_seed(app.home)
        wait_until((runs[2] / "metrics.jsonl").exists)
        begun[2].kill()
        wait_until(lambda: len(received) >= 4)
        app.end(signal.SIGKILL)
        app.start()
        time.sleep(2 * 10)  # two checks
    finally:
        for child in begun:
            child.kill()
            child.wait()
        app.end()
    actual = [(alert["run"], alert["kind"]) for _, alert in received]
    assert sorted(actual) == sorted(
        [
            (runs[0].name, "finished"),
            (runs[1].name, "non_finite"),
            (runs[1].name, "failed"),
            (runs[2].name, "lost"),
        ]
    )
    assert "loss" in next(alert["text"] for _, alert in received if alert["kind"] == "non_finite")
    reported = [json.loads(line) for line in (project / "told.jsonl").read_text().splitlines()]
    assert reported == [alert for _, alert in received]


def runs_by_seed(home: Path) -> dict[int, Path]:
    """Directories of runs by the seed of their experiment."""
    return {json.loads(file.read_text())["seed"]: file.parent for file in home.glob("[!.]*/experiment.json")}


@pytest.mark.browser
def test_open_pages_show_a_notice(
    app: RunningApp, open_page: Callable[..., Any], process: subprocess.Popen[bytes]
) -> None:
    run = live_run(app.home, 0, process)
    shown = open_page(app.url("/about"))
    shown.wait_for_function("sessionStorage.nnxAlerts !== undefined")
    finish(run)
    toast = shown.locator(".toast-body")
    toast.filter(has_text=f"{run.name} finished at step 100").wait_for()
    shown.goto(app.url("/new"))
    other = live_run(app.home, 1, process)
    change(other, state="failed", error="<img src=x onerror=alert(1)>")
    toast.filter(has_text="failed: <img src=x onerror=alert(1)>").wait_for()
    assert toast.count() == 1  # the first one was shown on the page before
    toast.get_by_role("link").click()
    shown.wait_for_url(f"**/run?id={other.name}")
