"""Getting into the app with a browser: the form, the cookie, links from elsewhere, an app below a path of a proxy."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.pages import PAGES
from tests.app.conftest import PATIENCE, TOKEN, RunningApp, with_token
from tests.app.many import experiment, write_run

pytestmark = pytest.mark.browser
Open = Callable[..., Any]


@pytest.fixture
def stranger(chromium: Any) -> Iterator[Any]:
    """A page of somebody who has opened nothing yet."""
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE)
    yield context.new_page()
    context.close()


def test_the_form_takes_the_token_and_leads_where_one_was_going(app: RunningApp, stranger: Any) -> None:
    run = write_run(app.home, experiment(0), "finished", 3).name
    stranger.goto(app.url(f"/run?id={run}"))
    assert "open the address that `nnxdsl app` printed" in stranger.inner_text("main")
    stranger.get_by_label("Token").fill("wrong")
    stranger.get_by_role("button", name="Open the app").click()
    stranger.wait_for_selector("text=Wrong token or password")
    stranger.get_by_label("Token").fill(TOKEN)
    stranger.get_by_role("button", name="Open the app").click()
    stranger.wait_for_selector(f"h1:has-text('{run}')")
    assert stranger.url == app.url(f"/run?id={run}")
    (cookie,) = stranger.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]


def test_a_password_opens_it(project: Path, environment: dict[str, str], stranger: Any) -> None:
    app = RunningApp(project, {**environment, "NNXDSL_APP_PASSWORD": "open sesame"})
    app.start()
    try:
        stranger.goto(app.url("/about"))
        stranger.get_by_label("Password").fill("open sesame")
        stranger.get_by_role("button", name="Open the app").click()
        stranger.wait_for_selector("h1:has-text('About')")
        stranger.get_by_role("cell", name="password", exact=True).wait_for()
        stranger.close()
    finally:
        app.end()


def test_a_link_on_another_site_opens_a_page(app: RunningApp, stranger: Any) -> None:
    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f'<a href="{app.url("/about")}">the app</a>'.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stranger.goto(with_token(app.url("/")))
        stranger.wait_for_selector("h1:has-text('Runs')")
        stranger.goto(f"http://localhost:{server.server_port}/")  # another site than 127.0.0.1
        stranger.get_by_role("link", name="the app").click()
        stranger.wait_for_selector("h1:has-text('About')")
        server.shutdown()


def test_an_app_below_a_path_works_as_one_that_is_not(
    project: Path, environment: dict[str, str], open_page: Open
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = RunningApp(project, environment, ("--proxy", f"http://127.0.0.1:{port}/lab/nnxdsl"), port=port)
    run = write_run(app.home, experiment(0), "finished", 3).name
    app.start()
    try:
        shown = open_page(app.url("/lab/nnxdsl/"))
        shown.wait_for_selector("#runs-table [role=gridcell]")
        for page in PAGES:
            if page.in_navigation:
                shown.get_by_role("link", name=page.title, exact=True).first.click()
                shown.wait_for_url(lambda url, path=page.path: url.partition("?")[0] == app.url(f"/lab/nnxdsl{path}"))
                shown.wait_for_selector("h1")
        shown.goto(app.url(f"/lab/nnxdsl/run?id={run}&tab=config"))
        with shown.expect_download() as saved:
            shown.get_by_role("link", name="metrics.csv").click()
        assert saved.value.suggested_filename == f"{run}-metrics.csv"
        shown.get_by_role("link", name="Clone").click()
        shown.wait_for_selector("#new-form .spec-field")
        assert "/lab/nnxdsl/new?" in shown.url
        shown.goto(app.url(f"/lab/nnxdsl/run?id={run}"))
        shown.get_by_role("button", name="Delete").click()  # an answer that leads to a path of the app
        shown.get_by_label(f"Type {run} to confirm").fill(run)
        shown.locator(".question").get_by_role("button", name="Delete").click()
        shown.wait_for_url(app.url("/lab/nnxdsl/"))
        shown.close()
    finally:
        app.end()
