"""What is refused before gradio sees it: foreign hosts and origins, wrong passwords, requests that are too large.

Loopback is no boundary: any web page may send requests to it, and a name may be made to point at it. Plain ASGI.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from .settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; object-src 'none'; "
        b"base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Sent with every answer. gradio's templates need 'unsafe-eval'; `connect-src` forbids any call to elsewhere."""

CLOSED = ("/monitoring", "/docs", "/redoc", "/openapi.json", "/gradio_api/vibe", "/gradio_api/proxy", "/proxy")
"""Paths of gradio's that the app has no use for."""

SAFE = ("GET", "HEAD")
SLOWEST = 8.0


@attrs.define
class Guard:
    """The outermost layer of the app.

    Attributes:
        app: What is guarded.
        settings: Hosts, password and limits.
        failures: Wrong passwords in a row; each makes the next answer slower.
    """

    app: App
    settings: Settings
    failures: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        if scope["type"] == "websocket":  # the app has none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        refused = self._refused(scope, headers) or await self._unknown(headers)
        if refused is not None:
            await _answer(send, *refused)
            return

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ours = {name for name, _ in HEADERS}
                message["headers"] = [pair for pair in message["headers"] if pair[0].lower() not in ours]
                message["headers"] += HEADERS
            await send(message)

        limit, read = self.settings.limits.upload_bytes, 0

        async def received() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise _TooLargeError
            return message

        try:
            await self.app(scope, received, sent)
        except _TooLargeError:
            await _answer(send, 413, f"at most {limit:,} bytes\n")

    def _refused(self, scope: Scope, headers: MutableMapping[str, str]) -> tuple[int, str] | None:
        if sum(key.lower() == b"host" for key, _ in scope["headers"]) != 1:
            return 400, "one Host header is needed\n"
        host = headers["host"]
        if _name(f"//{host}") not in self.settings.hosts:
            return 400, "this name is not known to the app; start it with --allow-host NAME\n"
        if scope["path"].startswith(CLOSED):
            return 404, "there is no such page\n"
        if not _is_own(scope["method"], host, headers):
            return 403, "asked by a page from elsewhere\n"
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.settings.limits.upload_bytes:
            return 413, f"at most {self.settings.limits.upload_bytes:,} bytes\n"
        return None

    async def _unknown(self, headers: MutableMapping[str, str]) -> tuple[int, str] | None:
        """Whoever does not know the password is asked for it, more slowly after each wrong one."""
        password = self.settings.password
        if password is None:
            return None
        given = _basic_password(headers.get("authorization", ""))
        if given is not None and hmac.compare_digest(given.encode(), password.encode()):
            self.failures = 0
            return None
        if given is not None:
            self.failures += 1
            await asyncio.sleep(min(SLOWEST, 0.25 * 2 ** min(self.failures, 10)))
        return 401, "the app's password is needed (any user name)\n"


class _TooLargeError(Exception):
    """A body that went on beyond the limit."""


def _is_own(method: str, host: str, headers: MutableMapping[str, str]) -> bool:
    """Whether a request was made by the app's own pages, by a person's navigation, or by no browser at all."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        return origin in (f"http://{host}", f"https://{host}")
    if site in (None, "same-origin", "none"):
        return True
    return (
        method in SAFE and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )


def _name(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is no number
    except ValueError:
        return None
    return parts.hostname if not parts.path and not parts.query and "@" not in parts.netloc else None


def _basic_password(header: str) -> str | None:
    scheme, _, coded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(coded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="nnxdsl", charset="UTF-8"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@attrs.define
class PageRoutes:
    """Gives every page's URL the one document that holds all pages; the browser reads from the URL which it shows."""

    app: App
    paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "http" and scope["method"] in SAFE and scope["path"] in self.paths:
            scope = {**scope, "path": "/", "raw_path": b"/"}
        await self.app(scope, receive, send)
