"""The pages in an app of somebody else: mounted at a path, or launched by gradio."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

import nnxdsl.app
from nnxdsl import RunError
from tests.app.many import experiment, write_run
from tests.app.on_pages import overflow
from tests.waiting import HANG_SECONDS

gr = pytest.importorskip("gradio")
Open = Callable[..., Any]

SERVER = """
import sys, nnxdsl.app, uvicorn
from fastapi import FastAPI
app = FastAPI()
app.get("/hello")(lambda: "hello")
app.get("/favicon.ico")(lambda: None)
nnxdsl.app.mount(app, "runs", path="/training")
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
LAUNCHED = """
import sys, nnxdsl.app
nnxdsl.app.blocks("runs").launch(server_port=int(sys.argv[1]), quiet=True)
"""


@pytest.mark.parametrize("path", ["training", "/a b", "//evil.example", "/a/../b?", "https://evil.example"])
def test_a_path_that_is_none_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(RunError, match="path: expected one such as /training"):
        nnxdsl.app.blocks(tmp_path, path=path)


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """Address of a server with one run."""
    write_run(tmp_path / "runs", experiment(0), "finished", 30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-c", request.param, str(port)], cwd=tmp_path, env=environment)
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(address).close()
        except URLError as error:
            if hasattr(error, "code"):
                break  # an answer, such as that there is no page at the root
            assert child.poll() is None
            time.sleep(0.1)
        else:
            break
    yield address
    child.terminate()
    child.wait(HANG_SECONDS)


def walked(shown: Any, run: str, path: str) -> None:
    """From the runs to one of them, its charts, and on to other pages by a button and by the navigation."""
    shown.locator(f"#runs-table [role=gridcell][data-col='1']:has-text('{run}')").click()
    shown.wait_for_url(f"**{path}/run?id={run}*")
    shown.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
    assert overflow(shown) == 0
    shown.get_by_role("link", name="Compare", exact=True).last.click()
    shown.wait_for_url(f"**{path}/compare?ids={run}")
    shown.get_by_role("navigation").get_by_role("link", name="Layout").click()
    shown.wait_for_url(f"**{path}/layout")


@pytest.mark.browser
@pytest.mark.parametrize("served", [SERVER], indirect=True, ids=["mounted"])
def test_pages_mounted_in_another_app(served: str, tmp_path: Path, open_page: Open) -> None:
    (run,) = (tmp_path / "runs").glob("*-*")
    with urllib.request.urlopen(f"{served}/hello") as answer:
        assert answer.read() == b'"hello"'
    shown = open_page(f"{served}/training/")
    shown.wait_for_selector("text=read-only")
    assert shown.get_by_role("button", name="Delete").count() == 0
    walked(shown, run.name, "/training")
    with urllib.request.urlopen(f"{served}/training/download?run={run.name}&file=metrics.jsonl") as answer:
        assert answer.read() == (run / "metrics.jsonl").read_bytes()
    with urllib.request.urlopen(f"{served}/training/download?compare={run.name}&as=html") as answer:
        assert answer.headers["content-disposition"] == f'attachment; filename="{run.name}.html"'
        assert answer.read().startswith(b"<!doctype html>")


@pytest.mark.browser
@pytest.mark.parametrize("served", [LAUNCHED], indirect=True, ids=["launched"])
def test_pages_launched_by_gradio(served: str, tmp_path: Path, open_page: Open) -> None:
    (run,) = (tmp_path / "runs").glob("*-*")
    walked(open_page(f"{served}/"), run.name, "")
