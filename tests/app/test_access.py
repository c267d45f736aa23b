"""Who may use the app: tokens, passwords, cookies, and what a proxy may say."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from app.security import access as access_module
from app.security.access import COOKIE_SECONDS, MOST_GUESSES, Access, BusyError, session_key
from app.security.guard import Guard, Needed
from app.settings import Settings
from nnxdsl import RunError
from tests.app.test_security import HOST, PATHS, TOKEN, ask, guard, inner, settings_from, status

HTML: dict[str, Any] = {"accept": "text/html,*/*"}
EVERY_PATH = (
    *("/", "/run", "/new", "/download", "/config", "/theme.css", "/static/x", "/assets/x", "/favicon.icon", "/app_id"),
    *("/gradio_api/run/predict", "/gradio_api/queue/join", "/gradio_api/queue/data", "/gradio_api/upload", "/login"),
    *("/gradio_api/heartbeat/x", "/gradio_api/cancel", "/gradio_api/reset", "/gradio_api/file=/etc/passwd", "/sign-in"),
    *("/gradio_api/startup-events", "/gradio_api/info", "/nothing", "//evil.example/", "/..", "/%00"),
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", EVERY_PATH)
def test_nothing_is_answered_without_the_token(method: str, path: str) -> None:
    app = guard()
    for wrong in ("", "Bearer", "Bearer x", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f"Token {TOKEN}", "Bearer \xe9"):
        code, headers, body = ask(app, method, path, authorization=wrong, cookie=f"nnxdsl-app-7860={TOKEN}")
        assert code == (403 if (method, path) == ("POST", "/sign-in") else 401), (method, path, wrong)
        assert TOKEN.encode() not in body
        assert "set-cookie" not in headers


def test_programs_are_told_in_json_and_people_with_a_form() -> None:
    said = json.loads(ask(guard(), authorization="")[2])
    assert "Authorization: Bearer TOKEN" in said["error"]
    code, headers, body = ask(guard(), "GET", "/run", query="id=x", authorization="", **HTML)
    assert (code, headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "open the address that `nnxdsl app` printed" in body.decode()
    assert 'name="next" value="/run?id=x"' in body.decode()
    assert "password" in ask(guard(password="p"), authorization="", **HTML)[2].decode()
    evil = ask(guard(), "GET", "/run", query="id=%22%3E%3Cscript%3E", authorization="", **HTML)[2]
    assert b"<script" not in evil


def cookie_of(app: Guard, path: str = "/", query: str = f"token={TOKEN}") -> tuple[str, str]:
    """The location and the cookie (name=value) that an address with the token gives."""
    code, headers, _ = ask(app, "GET", path, query=query, authorization="", sec_fetch_site="none")
    assert code == 303
    return headers["location"], headers.get("set-cookie", "")


def test_the_printed_address_leaves_a_cookie_and_no_token() -> None:
    app = guard()
    location, cookie = cookie_of(app, "/run", f"id=a+b&token={TOKEN}&tab=log")
    assert location == "/run?id=a+b&tab=log"
    attributes = cookie.split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={COOKIE_SECONDS}"} == set(attributes[1:])
    assert attributes[0].startswith("nnxdsl-app-7860=")
    assert TOKEN not in cookie
    assert status(app, "GET", "/", authorization="", cookie=f"other=1; {attributes[0]}") == 200
    code, headers, _ = ask(app, "GET", "/run", query="token=an-old-one", authorization="", cookie=attributes[0])
    assert (code, headers["location"], headers.get("set-cookie")) == (303, "/run", None)
    assert status(app, "POST", "/", b"", f"token={TOKEN}", authorization="") == 401


def test_an_icon_is_nothing_for_everybody() -> None:
    code, _, body = ask(guard(), "GET", "/favicon.ico", authorization="")
    assert (code, body) == (204, b"")
    assert status(guard(), "POST", "/favicon.ico", authorization="") == 401


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example", "/a\r\nx: y", "/é"])
def test_nobody_is_led_elsewhere(path: str) -> None:
    app = guard()
    location, _ = cookie_of(app, path)
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert location.isascii()
    assert location.isprintable()
    body = f"secret={TOKEN}&next={path}".encode()
    code, headers, _ = ask(app, "POST", "/sign-in", body, authorization="", origin=f"http://{HOST}")
    assert (code, headers["location"][:2] not in ("//", "/\\")) == (303, True)


def test_cookies_are_of_one_app_on_one_port_and_end() -> None:
    settings = Settings(home=Path("runs"), token=TOKEN)
    key = b"k" * 32
    first = Access.of(settings, 7860, key)
    value = first.new_cookie().split(";")[0]
    name, _, signed = value.partition("=")

    def is_known(access: Access, cookie: str) -> bool:
        return asyncio.run(access.is_signed_in({"cookie": cookie}, ""))

    assert is_known(first, value)
    assert is_known(Access.of(settings, 7860, key), value)  # the same app, started again
    assert not is_known(Access.of(settings, 7861, key), value)
    assert not is_known(Access.of(settings, 7861, key), f"nnxdsl-app-7861={signed}")
    assert not is_known(Access.of(settings, 7860, b"l" * 32), value)
    other = Settings(home=Path("runs"), token=f"{TOKEN}2")
    assert not is_known(Access.of(other, 7860, key), value)
    assert not is_known(Access.of(Settings(home=Path("runs"), password="p"), 7860, key), value)
    issued, _, signature = signed.partition("-")
    for wrong in (
        f"{int(issued) + 1}-{signature}",
        issued,
        f"-{signature}",
        f"{issued}-",
        "",
        "²-x",
        "9" * 5_000,
        "é-é",
    ):
        assert not is_known(first, f"{name}={wrong}"), wrong


def test_cookies_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access.of(Settings(home=Path("runs"), token=TOKEN))
    cookie = access.new_cookie().split(";")[0]
    now = time.time()
    monkeypatch.setattr(access_module.time, "time", lambda: now + COOKIE_SECONDS + 10)
    assert not asyncio.run(access.is_signed_in({"cookie": cookie}, ""))


def test_the_form_takes_the_token_or_the_password() -> None:
    for app, secret in ((guard(), TOKEN), (guard(password="right"), "right"), (guard(password="right"), TOKEN)):
        body = f"secret=+{secret}+&next=%2Frun%3Fid%3Dx".encode()
        code, headers, _ = ask(app, "POST", "/sign-in", body, authorization="", origin=f"http://{HOST}")
        assert (code, headers["location"]) == (303, "/run?id=x")
        assert status(app, authorization="", cookie=headers["set-cookie"].split(";")[0]) == 200
        code, headers, page = ask(app, "POST", "/sign-in", b"secret=wrong&next=/run", authorization="", **HTML)
        assert (code, "set-cookie" in headers) == (403, False)
        assert b"Wrong token or password" in page
    assert status(guard(), "POST", "/sign-in", b"secret=" + b"x" * 5_000, authorization="") == 413
    assert status(guard(), "POST", "/sign-in", b"secret=x", authorization="", origin="https://evil.example") == 403
    assert status(guard(), "GET", "/", query="token=wrong", authorization="", **HTML) == 403


def test_a_link_on_another_site_opens_the_page_in_two_steps() -> None:
    crossed: dict[str, Any] = {
        **HTML,
        "sec_fetch_site": "cross-site",
        "sec_fetch_mode": "navigate",
        "sec_fetch_dest": "document",
    }
    refresh = b'<meta http-equiv="refresh" content="0">'
    assert refresh in ask(guard(), authorization="", **crossed)[2]
    assert refresh not in ask(guard(), authorization="", **HTML, sec_fetch_site="same-origin")[2]


ATTACKER, USER = "10.0.0.1", "10.0.0.2"


@pytest.mark.extended
def test_guesses_in_parallel_take_as_long_as_one_after_another() -> None:
    app, responses = guard(password="right"), list[tuple[str, str]]()

    async def tried(secret: str, address: str = ATTACKER) -> None:
        assert await app.access.is_secret(secret, address) == (secret == "right")
        responses.append((secret, address))

    async def all_at_once(*secrets: str) -> None:
        await asyncio.gather(*map(tried, secrets))

    async def of_both() -> None:
        await asyncio.gather(tried("wrong", USER), tried("wrong"))

    asyncio.run(tried("wrong", USER))
    began = time.monotonic()
    asyncio.run(all_at_once("wrong-1", "wrong-2", "wrong-3", "right"))
    assert time.monotonic() - began > 3.4  # 0.5, 1 and 2 seconds, one after another; a wait is never shorter
    secrets = [secret for secret, _ in responses[1:]]
    assert secrets == ["right", "wrong-1", "wrong-2", "wrong-3"]  # the right one does not wait for those of others
    asyncio.run(of_both())
    assert [address for _, address in responses[-2:]] == [ATTACKER, USER]  # whose count began anew waits less


def test_wrong_passwords_of_others_keep_nobody_out() -> None:
    app = guard(password="right")

    async def flood() -> list[Any]:
        guesses = [app.access.is_secret(f"wrong-{n}", f"10.1.0.{n % 60}") for n in range(60 * MOST_GUESSES)]
        waiting = [asyncio.create_task(guess) for guess in guesses]
        await asyncio.sleep(0)
        for address in ("10.1.0.0", "10.1.0.59"):
            with pytest.raises(BusyError):  # not compared, so that nobody tries more than can wait
                await app.access.is_secret("right", address)
            assert await app.access.is_secret(TOKEN, address)  # whoever has the token is never held up
        assert await app.access.is_secret("right", USER)
        for task in waiting:
            task.cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(flood())
    assert asyncio.run(app.access.is_secret("right", "10.1.0.0"))


def test_wrong_passwords_are_answered_when_the_app_ends() -> None:
    app = guard(password="right")

    async def flood() -> list[bool]:
        guesses = [asyncio.create_task(app.access.is_secret("wrong", ATTACKER)) for _ in range(MOST_GUESSES)]
        await asyncio.sleep(0)
        assert not any(guess.done() for guess in guesses)  # the last is due in more than two minutes
        app.access.close()
        return [*await asyncio.gather(*guesses), await app.access.is_secret("late", ATTACKER)]

    assert asyncio.run(asyncio.wait_for(flood(), 60)) == [False] * (MOST_GUESSES + 1)


def test_addresses_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "MOST_ADDRESSES", 3)
    access = guard(password="right").access
    for n in range(10):
        assert asyncio.run(access.is_secret("right", f"10.1.0.{n}"))
    assert len(access._guesses) == 3


def test_the_key_of_cookies_is_kept_and_trusted_only_where_nobody_else_had_it(tmp_path: Path) -> None:
    place = tmp_path / ".app"
    key, path = session_key(place), place / "session.key"
    assert session_key(place) == key == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for spoil in (
        lambda: path.chmod(0o644),
        lambda: (path.chmod(0o600), os.link(path, place / "other")),
        lambda: (path.rename(place / "third"), path.symlink_to(place / "third")),
        lambda: (path.unlink(), path.mkdir()),
    ):
        spoil()
        assert session_key(place) != key
    path.rmdir()
    path.write_bytes(b"short")
    path.chmod(0o600)
    assert len(session_key(place)) == 32
    (tmp_path / "file").write_text("x")
    assert len(session_key(tmp_path / "file")) == 32  # nothing can be kept there


def test_short_tokens_and_odd_proxies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNXDSL_APP_TOKEN", "short")
    with pytest.raises(RunError, match="expected 16 or more"):
        settings_from()
    monkeypatch.setenv("NNXDSL_APP_TOKEN", TOKEN)
    settings = settings_from("--proxy", "https://Lab.example:8443/nnxdsl/")
    assert (settings.proxy, settings.root) == ("https://lab.example:8443/nnxdsl", "/nnxdsl")
    assert "lab.example" in settings.hosts
    assert TOKEN not in repr(settings)
    for wrong in (
        "lab.example",
        "ftp://lab",
        "https://",
        "https://a@lab",
        "https://lab/?x",
        "https://lab/../x y",
        "//x",
    ):
        with pytest.raises(RunError, match="--proxy"):
            settings_from("--proxy", wrong)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    reported = {key.decode(): value.decode() for key, value in scope["headers"]}
    result = {"path": scope["path"], "scheme": scope.get("scheme", "http"), "headers": reported}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(result).encode()})


FORWARDED: dict[str, Any] = {
    "x_forwarded_host": "evil.example",
    "x_forwarded_proto": "https",
    "x_forwarded_for": "1.2.3.4",
    "forwarded": "host=evil.example",
    "x_gradio_server": "http://evil.example",
}


def test_what_headers_say_of_a_proxy_counts_only_for_the_one_that_was_named() -> None:
    plain = Guard(echo, Settings(home=Path("runs"), token=TOKEN))
    actual = json.loads(ask(plain, **FORWARDED)[2])
    assert (actual["scheme"], actual["headers"]["host"]) == ("http", HOST)
    assert "evil" not in json.dumps(actual)
    named = Guard(echo, Settings(home=Path("runs"), token=TOKEN, proxy="https://lab.example/nnxdsl"))
    assert "evil" not in json.dumps(json.loads(ask(named, **FORWARDED)[2]))
    through: list[dict[str, Any]] = [{"host": "lab.example"}, {"x_forwarded_host": "lab.example"}]
    for headers in through:
        for path, inner_path in (("/nnxdsl/run", "/run"), ("/run", "/run"), ("/nnxdsl", "/"), ("/nnxdslx", "/nnxdslx")):
            actual = json.loads(ask(named, path=path, origin="https://lab.example", **headers)[2])
            assert (actual["path"], actual["scheme"], actual["headers"]["host"]) == (inner_path, "https", "lab.example")
    assert status(named, host="lab.example", origin="https://evil.example") == 403
    opened = ask(named, path="/nnxdsl/run", query=f"token={TOKEN}", host="lab.example", authorization="")[1]
    assert opened["location"] == "/nnxdsl/run"
    assert "Path=/nnxdsl/" in opened["set-cookie"]
    assert "Secure" in opened["set-cookie"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_what_no_page_asks_for_does_not_exist(method: str) -> None:
    app = Needed(inner, PATHS)
    reads = {"/", "/run", "/new", "/config", "/download", "/theme.css", "/static/x", "/assets/x"}
    reads |= {"/gradio_api/info", "/gradio_api/queue/data"}
    calls = {"/gradio_api/run/predict", "/gradio_api/queue/join"}
    for path in EVERY_PATH:
        is_needed = path in (reads if method in ("GET", "HEAD") else calls if method == "POST" else ())
        assert status(app, method, path) == (200 if is_needed else 404), (method, path)


def test_a_password_in_basic_is_never_a_token() -> None:
    coded = base64.b64encode(f"x:{TOKEN}".encode()).decode()
    assert status(guard(), authorization=f"Basic {coded}") == 401
