"""What is refused before gradio sees it."""

from __future__ import annotations

import asyncio
import base64
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from app.command import add_arguments, settings_of
from app.downloads import Downloads
from app.pages import PAGES
from app.security.guard import HEADERS, Guard, Needed
from app.settings import Limits, Settings
from app.state import Site
from nnxdsl import RunError
from tests.app.many import experiment, write_run

HOST = "127.0.0.1:7860"
TOKEN = "a-token-of-these-tests"
PATHS = frozenset(page.path for page in PAGES)


def settings_from(*argv: str) -> Settings:
    parser = ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args(argv))


def ask(app: Any, method: str = "GET", path: str = "/", body: bytes = b"", query: str = "", **headers: str) -> Any:
    """(status, headers, body) of one request, with the token; names of headers with hyphens for underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {"host": HOST, "authorization": f"Bearer {TOKEN}", **named}
    raw = [(name.encode(), value.encode()) for name, value in fields.items() if value]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    sent: list[dict[str, Any]] = []

    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        """The request, once: as of a server, the next message comes when the client is gone."""
        return next(requests, None) or await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    result = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], result, b"".join(message.get("body", b"") for message in sent[1:])


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-frame-options", b"ALLOW")]})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def guard(**changes: Any) -> Guard:
    return Guard(inner, Settings(**{"home": Path("runs"), "token": TOKEN, **changes}))


def status(app: Any, *argv: Any, **headers: str) -> int:
    return ask(app, *argv, **headers)[0]


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1", "[::1]:7860", HOST])
def test_its_own_names_are_answered(host: str) -> None:
    assert status(guard(), host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("rebind.evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "evil.example:7860"),
        *("localhost:x", "", "localhost/evil", "localhost?x", "[::1", "0.0.0.0"),
    ],
)
def test_other_names_are_not(host: str) -> None:
    assert status(guard(), "POST", "/gradio_api/queue/join", host=host) == 400


def test_names_may_be_added() -> None:
    assert status(guard(allowed_hosts=("lab.example",)), host="lab.example") == 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:7861"])
def test_foreign_origins_are_refused(method: str, origin: str) -> None:
    assert status(guard(), method, "/gradio_api/run/predict", origin=origin) == 403


def test_its_own_origin_and_programs_are_answered() -> None:
    assert status(guard(), "POST", origin=f"http://{HOST}") == 200
    assert status(guard(), "POST") == 200
    assert status(guard(), "POST", sec_fetch_site="cross-site") == 403
    assert status(guard(), "GET", sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == 403
    assert status(guard(), sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document") == 200
    assert status(guard(), sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="iframe") == 403


def test_headers_are_sent_with_answers_and_refusals() -> None:
    for headers in (ask(guard())[1], ask(guard(), host="evil.example")[1]):
        for name, value in HEADERS:
            assert headers[name.decode()] == value.decode()


@pytest.mark.parametrize(
    "path", ["/monitoring", "/monitoring/x", "/docs", "/openapi.json", "/gradio_api/proxy=http://a"]
)
def test_what_the_app_has_no_use_for_is_closed(path: str) -> None:
    assert status(Needed(inner, PATHS), "GET", path) == 404


def test_large_requests_are_refused_whether_or_not_they_say_so() -> None:
    small = guard(limits=Limits(upload_bytes=100))
    assert status(small, "POST", "/upload", b"", content_length="101") == 413
    assert status(small, "POST", "/upload", b"", content_length="-1") == 413
    assert status(small, "POST", "/upload", b"x" * 101) == 413
    assert status(small, "POST", "/upload", b"x" * 100) == 200


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_request_that_gradio_cannot_take_is_one_line_of_the_log(
    is_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        if is_begun:
            await inner(scope, receive, send)
        raise KeyError("fn_index\nFORGED LINE")

    app = Guard(failing, Settings(home=Path("runs"), token=TOKEN))
    assert status(app, "POST", "/gradio_api/run/predict\n", b"{}") == (200 if is_begun else 500)
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    assert record.exc_info is None
    assert message.startswith("POST '/gradio_api/run/predict\\n': ")
    assert "KeyError" in message
    assert "test_security.py:" in message


def test_a_password_is_asked_for_on_every_path_and_wrong_ones_are_slow() -> None:
    app = guard(password="right")
    known = "Basic " + base64.b64encode(b"anyone:right").decode()
    for path in ("/", "/run", "/gradio_api/heartbeat/x", "/gradio_api/cancel", "/config", "/download", "/app_id"):
        assert status(app, "GET", path, authorization="") == 401
        assert status(app, "GET", path, authorization=known) == 200
    began = time.monotonic()
    for wrong in ("Basic " + base64.b64encode(b"a:wrong").decode(), "Bearer right", "Basic ???"):
        assert status(app, "GET", "/", authorization=wrong) == 401
    assert time.monotonic() - began > 0.4


def test_other_hosts_need_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNXDSL_APP_PASSWORD", raising=False)
    with pytest.raises(RunError, match="would open the app to others"):
        settings_from("--host", "0.0.0.0")
    monkeypatch.setenv("NNXDSL_APP_PASSWORD", "secret")
    settings = settings_from("--host", "0.0.0.0", "--allow-host", "lab")
    assert settings.password == "secret"
    assert "secret" not in repr(settings)
    assert settings.hosts == ("127.0.0.1", "localhost", "::1", "lab")


@pytest.fixture
def downloads(tmp_path: Path):
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    write_run(site.settings.home, experiment(0), "finished", 3)
    (tmp_path / "secret.txt").write_text("secret")
    yield Downloads(inner, site)
    site.close()


def test_downloads_are_the_named_files_of_runs_alone(downloads: Downloads, tmp_path: Path) -> None:
    run = experiment(0).id
    code, headers, body = ask(downloads, path="/download", query=f"run={run}&file=metrics.jsonl")
    assert (code, body.count(b"\n")) == (200, 3)
    assert headers["content-disposition"] == f'attachment; filename="{run}-metrics.jsonl"'
    for query in (
        f"run={run}&file=../../secret.txt",
        f"run={run}&file=status.json",
        "run=..&file=experiment.json",
        "run=../runs&file=log.txt",
        f"run=/etc&file={run}",
        f"run={run}",
        "",
    ):
        assert ask(downloads, path="/download", query=query)[0] == 404, query
    (tmp_path / "runs" / run / "log.txt").symlink_to(tmp_path / "secret.txt")
    assert ask(downloads, path="/download", query=f"run={run}&file=log.txt")[0] == 404
    assert ask(downloads, "POST", "/download", query=f"run={run}&file=metrics.jsonl")[0] == 404
