"""ASGI middleware in front of gradio: rejects foreign hosts and origins, unauthenticated and oversized requests.

Listening on loopback is no protection: any web page can send requests to it, DNS rebinding can point a host name at it,
and other accounts of the machine can reach it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import attrs

from ..settings import Settings
from . import sign_in
from .access import Access, BusyError

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
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Headers of every response. gradio's templates need 'unsafe-eval'; `connect-src` forbids requests to other hosts."""

SAFE = ("GET", "HEAD")
ICON = "/favicon.ico"
"""Requested by browsers automatically, outside the path of the cookie; answered with 404."""

FORWARDED = (b"x-forwarded-", b"forwarded", b"x-gradio-server", b"x-original-")
"""Forwarding headers of proxies, which a client could forge to put other hosts into pages."""


@attrs.define
class Guard:
    """The outermost middleware.

    Attributes:
        app: The wrapped ASGI app.
        settings: Allowed hosts and limits.
        access: Authentication.
    """

    app: App
    settings: Settings
    access: Access = attrs.field(default=attrs.Factory(lambda guard: Access.of(guard.settings), takes_self=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or rejects it."""
        if scope["type"] == "websocket":  # the app uses none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = self._behind_proxy(scope)
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        refused = self._refused(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
            return
        if scope["path"] == ICON and scope["method"] in SAFE:
            await _answer(send, 204, "")
            return
        if await self._is_signing_in(scope, headers, receive, send):
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

    def _behind_proxy(self, scope: Scope) -> Scope:
        """Restores host and scheme of a request from the configured proxy, and strips the app's root path.

        Other forwarding headers are removed, since gradio would put them into the page.
        """
        received = {key.lower(): value for key, value in scope["headers"]}
        scope = {**scope, "headers": [pair for pair in scope["headers"] if not pair[0].lower().startswith(FORWARDED)]}
        if self.settings.proxy is None:
            return scope
        proxy, root = urlsplit(self.settings.proxy), self.settings.root
        name = proxy.netloc.encode()
        if received.get(b"x-forwarded-host", b"").split(b",")[0].strip() == name:
            others = [pair for pair in scope["headers"] if pair[0].lower() != b"host"]
            scope["headers"] = [*others, (b"host", name)]
        if (b"host", name) in scope["headers"]:
            scope["scheme"] = proxy.scheme
        if root and f"{scope['path']}/".startswith(f"{root}/"):
            path = scope["path"][len(root) :] or "/"
            scope |= {"path": path, "raw_path": quote(path).encode()}
        return scope

    def _refused(self, scope: Scope, headers: MutableMapping[str, str]) -> tuple[int, str] | None:
        if sum(key.lower() == b"host" for key, _ in scope["headers"]) != 1:
            return 400, "one Host header is needed\n"
        host = headers["host"]
        if _name(f"//{host}") not in self.settings.hosts:
            return 400, "unknown host name; start the app with --allow-host NAME\n"
        if not _is_own(scope["method"], host, headers):
            return 403, "cross-origin request\n"
        length = headers.get("content-length", "0")
        is_number = length.isascii() and length.isdigit() and len(length) < 20
        if not is_number or int(length) > self.settings.limits.upload_bytes:
            return 413, f"at most {self.settings.limits.upload_bytes:,} bytes\n"
        return None

    async def _is_signing_in(
        self, scope: Scope, headers: MutableMapping[str, str], receive: Receive, send: Send
    ) -> bool:
        """Responds to unauthenticated and sign-in requests; returns False if the request may proceed."""
        query = scope["query_string"].decode("latin-1")
        here = sign_in.address(scope["path"], query)
        is_form = scope["method"] == "POST" and scope["path"] == sign_in.PATH
        tokens = parse_qs(query).get("token", []) if scope["method"] in SAFE else []
        try:
            if is_form:
                secret, here = sign_in.given(await _body(receive, sign_in.MOST_BYTES))
                is_right, is_signed_in = await self.access.is_secret(secret), False
            else:
                is_right = any(map(self.access.is_token, tokens))
                is_signed_in = is_right or await self.access.is_signed_in(headers)
                if is_signed_in and not tokens:
                    return False
        except BusyError:
            await self._ask(send, 429, headers, here)
            return True
        except _TooLargeError:
            await _answer(send, 413, f"at most {sign_in.MOST_BYTES:,} bytes\n")
            return True
        if not (is_right or is_signed_in):  # report a wrong secret, whether it came from the form or the URL
            await self._ask(send, 403 if is_form or tokens else 401, headers, here)
            return True
        to = [(b"location", f"{self.settings.root}{here}".encode()), (b"cache-control", b"no-store")]
        cookie = [(b"set-cookie", self.access.new_cookie().encode())] if is_right else []
        await _answer(send, 303, "", [*to, *cookie])
        return True

    async def _ask(self, send: Send, status: int, headers: MutableMapping[str, str], here: str) -> None:
        """Sends the sign-in form to a browser that opens a page, and a JSON error to programs."""
        more = [(b"cache-control", b"no-store"), *([(b"www-authenticate", b"Bearer")] if status == 401 else [])]
        has_password = self.access.password is not None
        if "text/html" not in headers.get("accept", ""):
            text = sign_in.refusal(status, has_password)
            await _answer(send, status, text, [(b"content-type", b"application/json"), *more])
            return
        again = status == 401 and headers.get("sec-fetch-site") == "cross-site"
        text = sign_in.page(status, has_password, self.settings.root, here, again=again)
        await _answer(send, status, text, [(b"content-type", b"text/html; charset=utf-8"), *more])


class _TooLargeError(Exception):
    """The request body exceeds the limit."""


def _is_own(method: str, host: str, headers: MutableMapping[str, str]) -> bool:
    """Whether a request comes from the app's own pages, from user navigation, or from a program."""
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
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    return parts.hostname if not parts.path and not parts.query and "@" not in parts.netloc else None


async def _body(receive: Receive, limit: int) -> bytes:
    found, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        found, more = found + message.get("body", b""), message.get("more_body", False)
        if len(found) > limit:
            raise _TooLargeError
    return found


async def _answer(send: Send, status: int, text: str | bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode() if isinstance(text, str) else text
    named = headers or [(b"content-type", b"text/plain; charset=utf-8")]
    start = [*named, (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


@attrs.define
class Needed:
    """Passes on only those routes of gradio that the app's own pages and gradio_client use.

    gradio also has routes that accept uploads, fetch URLs, run code or expose its state.
    """

    app: App
    pages: frozenset[str]
    reads: tuple[str, ...] = (
        *("/", "/config", "/theme.css", "/download"),
        *("/gradio_api/app_id", "/gradio_api/info", "/gradio_api/queue/data"),
    )
    trees: tuple[str, ...] = ("/assets/", "/static/")
    asks: tuple[str, ...] = ("/gradio_api/run/predict", "/gradio_api/queue/join")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or rejects it."""
        if scope["type"] == "http" and not self._is_needed(scope["method"], scope["path"]):
            await _answer(send, 404, "there is no such page\n")
            return
        await self.app(scope, receive, send)

    def _is_needed(self, method: str, path: str) -> bool:
        if method in SAFE:
            return path in self.pages or path in self.reads or path.startswith(self.trees)
        return method == "POST" and path in self.asks
