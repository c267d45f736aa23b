"""ASGI middleware in front of gradio: rejects foreign hosts and origins, unauthenticated and oversized requests.

Listening on loopback is no protection: any web page can send requests to it, DNS rebinding can point a host name at it,
and other accounts of the machine can reach it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import attrs
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

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

_LOG = logging.getLogger("uvicorn.error")
SAFE = ("GET", "HEAD")
ICON = "/favicon.ico"
"""Requested by browsers automatically, outside the path of the cookie; answered with nothing."""

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
        scope, limit = self._behind_proxy(scope), self.settings.limits.upload_bytes
        is_answered = False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                ours = {name for name, _ in HEADERS}
                message["headers"] = [*(pair for pair in message["headers"] if pair[0].lower() not in ours), *HEADERS]
            await send(message)

        try:
            answer = self._refusal(scope) or await self._sign_in(scope, receive)
            await (answer or self.app)(scope, _limited(receive, limit), sent)
        except _TooLargeError:
            await _text(413, f"at most {limit:,} bytes")(scope, receive, sent)
        except ClientDisconnect:
            return
        except Exception as error:  # gradio raises for requests that are not as its own pages send them
            _LOG.error("%s", _in_one_line(scope, error))
            if not is_answered:
                await _text(500, "the request could not be answered")(scope, receive, sent)

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

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not one of the app's pages, whoever sends it."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return _text(400, "one Host header is needed")
        if _name(f"//{hosts[0]}") not in self.settings.hosts:
            return _text(400, "unknown host name; start the app with --allow-host NAME")
        if not _is_own(scope["method"], hosts[0], headers):
            return _text(403, "cross-origin request")
        length, limit = headers.get("content-length", "0"), self.settings.limits.upload_bytes
        is_number = length.isascii() and length.isdigit() and len(length) < 20
        if not is_number or int(length) > limit:
            return _text(413, f"at most {limit:,} bytes")
        return Response(status_code=204) if scope["path"] == ICON and scope["method"] in SAFE else None

    async def _sign_in(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer to an unauthenticated or sign-in request; None if the request may proceed."""
        headers, query = Headers(scope=scope), scope["query_string"].decode("latin-1")
        here = sign_in.address(scope["path"], query)
        address = (scope.get("client") or ("",))[0]
        is_form = scope["method"] == "POST" and scope["path"] == sign_in.PATH
        tokens = parse_qs(query).get("token", []) if scope["method"] in SAFE else []
        try:
            if is_form:
                body = await Request(scope, _limited(receive, sign_in.MOST_BYTES)).body()
                secret, here = sign_in.credentials(body)
                is_right, is_signed_in = await self.access.is_secret(secret, address), False
            else:
                is_right = any(map(self.access.is_token, tokens))
                is_signed_in = is_right or await self.access.is_signed_in(headers, address)
                if is_signed_in and not tokens:
                    return None
        except BusyError:
            return self._ask(429, headers, here)
        if not (is_right or is_signed_in):  # report a wrong secret, whether it came from the form or the URL
            return self._ask(403 if is_form or tokens else 401, headers, here)
        cookie = {"set-cookie": self.access.new_cookie()} if is_right else {}
        to = {"location": f"{self.settings.root}{here}", "cache-control": "no-store"}
        return Response(status_code=303, headers={**to, **cookie})

    def _ask(self, status: int, headers: Headers, here: str) -> Response:
        """The sign-in form for a browser that opens a page, and a JSON error for programs."""
        more = {"cache-control": "no-store", **({"www-authenticate": "Bearer"} if status == 401 else {})}
        has_password = self.access.password is not None
        if "text/html" not in headers.get("accept", ""):
            return Response(sign_in.refusal(status, has_password), status, more, "application/json")
        again = status == 401 and headers.get("sec-fetch-site") == "cross-site"
        page = sign_in.page(status, has_password, self.settings.root, here, again=again)
        return Response(page, status, more, "text/html")


def _in_one_line(scope: Scope, error: Exception) -> str:
    """A request, what was raised for it, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return f"{scope['method']} {scope['path'][:200]!r}: {text[:1_000]!r}"


class _TooLargeError(Exception):
    """The request body exceeds the limit."""


def _limited(receive: Receive, limit: int) -> Receive:
    """Receives a body of at most so many bytes."""
    read = 0

    async def received() -> MutableMapping[str, Any]:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise _TooLargeError
        return message

    return received


def _is_own(method: str, host: str, headers: Headers) -> bool:
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


def _text(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)


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
        is_needed = scope["type"] != "http" or self._is_needed(scope["method"], scope["path"])
        await (self.app if is_needed else _text(404, "there is no such page"))(scope, receive, send)

    def _is_needed(self, method: str, path: str) -> bool:
        if method in SAFE:
            return path in self.pages or path in self.reads or path.startswith(self.trees)
        return method == "POST" and path in self.asks
