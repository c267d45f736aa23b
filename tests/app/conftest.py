"""A tiny run, an app as a process of its own, and a browser that tolerates no error and no request to elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from app.settings import Settings
from nnxdsl.storage import process_info
from tests.app.browser import launch
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
NATIVE = (
    "access",
    "alerts",
    "axes",
    "charts",
    "demo",
    "html",
    "pages",
    "run_paths",
    "runs",
    "security",
    "served",
    "sign_in_browser",
    "tags",
)
collect_ignore = [] if importlib.util.find_spec("gradio") else [f"test_{name}.py" for name in NATIVE]
"""Those that need the app's extra packages."""
TOKEN = "the-token-of-tests-of-the-app"
PATIENCE = 240_000
"""Milliseconds that a page is waited for: a limit ends what hangs, and is no measure of speed."""
LEAVING_SECONDS = 2.0
"""Between an unanswered request and the moment that its page is left."""

TINY = """
from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    adapter=Adapter.LoRA(rank=2, alpha=4.0, targets=("attention",)),
    objective=Objective.DPO(beta=0.2),
    data=Data.Preferences("pairs.jsonl", max_prompt_length=32, max_completion_length=16),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=2e-3)),
    batch_size=2,
    steps=12,
    evaluation=Evaluation(
        every_steps=6,
        data=Data.Preferences("pairs_held_out.jsonl", max_prompt_length=32, max_completion_length=16),
        prompts=("Say 1: ",),
        max_new_tokens=4,
    ),
    checkpoint=Checkpoint(every_steps=4, keep=2),
)

if __name__ == "__main__":
    experiment.main()
"""


def write_project(place: Path) -> Path:
    """A project with `experiments/tiny.py` and its pairs."""

    def pair(number: int) -> dict[str, object]:
        return {
            "prompt": f"Say {number}: ",
            "chosen": "good " + "x" * (number % 4),
            "rejected": "bad " + "y" * (number % 3),
        }

    (place / "experiments").mkdir(parents=True)
    (place / "experiments" / "tiny.py").write_text(TINY, encoding="utf-8")
    for name, numbers in (("pairs", range(40)), ("pairs_held_out", range(40, 50))):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(pair(n)) + "\n" for n in numbers), encoding="utf-8")
    return place


@attrs.define
class RunningApp:
    """`python -m nnxdsl app` over `project/runs`, in a process of its own that can be ended and started again."""

    project: Path
    environment: dict[str, str]
    argv: tuple[str, ...] = ()
    python: str = sys.executable
    port: int = 0
    token: str | None = TOKEN
    line: str = ""
    child: subprocess.Popen[str] | None = None

    @property
    def home(self) -> Path:
        return self.project / "runs"

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def start(self) -> float:
        """Starts it, on the same port as before; returns the seconds until it answered.

        Its token is `token`; where that is None, it is the one of the address that it prints, and `token` from then on.
        """
        began = time.monotonic()
        fields = {} if self.token is None else {"NNXDSL_APP_TOKEN": self.token}
        self.child = subprocess.Popen(
            [self.python, "-m", "nnxdsl", "app", "--port", str(self.port), *self.argv],
            cwd=self.project,
            env={**self.environment, **fields},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.child.stdout is not None
        line = self.line = self.child.stdout.readline()
        assert "nnxdsl app on http" in line, line + self.child.stdout.read()
        if "127.0.0.1:" in line:  # else it is the address of a proxy
            self.port = int(line.split("127.0.0.1:")[1].split("/")[0])
        if self.token is None:
            self.token = line.split("?token=")[1].split()[0]
        asked = urllib.request.Request(self.url(), headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as answer:
            assert answer.status == 200
        return time.monotonic() - began

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it and returns its exit code; runs that it launched go on."""
        assert self.child is not None
        assert self.child.stdout is not None
        self.child.send_signal(number)
        code = self.child.wait(HANG_SECONDS)
        self.child.stdout.close()
        self.child = None
        return code


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    """The state of an app with an empty home, whose project is the directory of the test."""
    site = pytest.importorskip("app.state").Site(Settings(home=tmp_path / "runs", project=tmp_path))
    yield site
    site.close()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """An environment of child processes, which share what XLA compiles, and all of it: they start again and again."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


def kill_runs(project: Path) -> None:
    """Ends runs that outlive their app, which is the point of it, and their home, where a test has moved them."""
    for status in project.rglob("status.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads(status.read_text())
            if (
                process_info.is_alive(result["pid"], result["pid_started"])
                and result["host"] == process_info.hostname()
            ):
                os.kill(result["pid"], signal.SIGKILL)


def serving(project: Path, environment: dict[str, str], *argv: str) -> Iterator[RunningApp]:
    app = RunningApp(project, environment, argv)
    app.start()
    try:
        yield app
    finally:
        if app.child is not None:
            app.end()
        kill_runs(project)


@pytest.fixture
def app(project: Path, environment: dict[str, str]) -> Iterator[RunningApp]:
    """An app over an empty directory of runs."""
    yield from serving(project, environment)


@pytest.fixture(scope="session")
def shared_app(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[RunningApp]:
    """One app for many tests that end and start none: to start one takes seconds."""
    yield from serving(write_project(tmp_path_factory.mktemp("shared") / "project"), environment)


@pytest.fixture
def emptied_app(shared_app: RunningApp) -> RunningApp:
    """The shared app over an empty directory of runs."""
    kill_runs(shared_app.project)
    shutil.rmtree(shared_app.home, ignore_errors=True)
    shutil.rmtree(shared_app.project / "experiments")
    write_project(shared_app.project)
    return shared_app


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Chromium, once for all tests."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'nnxdsl[browser]'")
    with api.sync_playwright() as playwright:
        try:
            browser = launch(playwright)
        except FileNotFoundError as error:
            pytest.skip(str(error))
        yield browser
        browser.close()


@attrs.define(slots=False)  # playwright notes something on it
class Watched:
    """What browser pages did that they must not."""

    errors: list[str] = attrs.Factory(list)
    outside: list[str] = attrs.Factory(list)
    allowed: tuple[str, ...] = ()
    left: list[float] = attrs.Factory(list)  # when pages were left
    lost: list[float] = attrs.Factory(list)  # when gradio told that a request had no answer

    def watch(self, page: Any) -> None:
        paths: list[str] = []

        def moved(frame: Any) -> None:
            path = frame.url.partition("?")[0]
            if frame == page.main_frame and paths[-1:] != [path]:
                paths.append(path)
                self.left.append(time.monotonic())

        page.on("framenavigated", moved)
        page.on("domcontentloaded", lambda _: self.left.append(time.monotonic()))
        page.on("close", lambda _: self.left.append(time.monotonic()))
        page.on("console", self._on_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)

    def _on_message(self, message: Any) -> None:
        if message.type == "error" and "Connection errored out" in message.text:
            self.lost.append(time.monotonic())
        elif message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.outside.append(request.url)

    def require_clean(self) -> None:
        assert self.outside == []
        # A request that is under way when its page is left has no answer, which gradio logs.
        assert [lost for lost in self.lost if all(abs(lost - left) > LEAVING_SECONDS for left in self.left)] == []
        # gradio aborts its requests when a page is left, and its plots log that as an error.
        aborts = ("AbortError: signal is aborted without reason", "AbortError: BodyStreamBuffer was aborted")
        allowed = (*self.allowed, *aborts)
        assert [error for error in self.errors if not any(part in error for part in allowed)] == []


@pytest.fixture
def watched() -> Iterator[Watched]:
    """At the end of a test, that no page logged an error (but those in `allowed`) or asked for anything elsewhere."""
    watched = Watched()
    yield watched
    watched.require_clean()


def with_token(url: str, token: str = TOKEN) -> str:
    """An address as the app prints it: it leaves a cookie and leads to the address without the token."""
    return f"{url}{'&' if '?' in url else '?'}token={token}"


@pytest.fixture
def open_page(chromium: Any, watched: Watched) -> Iterator[Callable[..., Any]]:
    """`open_page(url, width=1280, dark=False)`: a watched page in a context of its own."""
    contexts = []

    def opened(url: str, *, width: int = 1280, dark: bool = False) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        watched.watch(page)
        page.goto(with_token(url))
        return page

    yield opened
    for context in contexts:
        context.close()
