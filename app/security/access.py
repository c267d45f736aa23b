"""Authentication: a token or a password, then a signed cookie. Independent of pages and gradio.

Other accounts of a machine can reach a port on loopback, so every request needs one of:

- the cookie that the printed address (`/?token=...`) or the sign-in form sets: signed, for one port, never the token;
- `Authorization: Bearer TOKEN`, for programs;
- `Authorization: Basic ...` with the password and any user name, where the app has a password.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import attrs

from ..settings import Settings

COOKIE_SECONDS = 30 * 24 * 3600
SLOWEST = 8.0
MOST_GUESSES = 20
"""Wrong passwords of one address that may be pending; further attempts from there are rejected without a check."""
MOST_ADDRESSES = 10_000
"""Addresses whose wrong passwords are remembered; the one whose last attempt is oldest is forgotten first."""

_KEY_BYTES = 32


class BusyError(Exception):
    """Too many wrong passwords of an address are pending."""


@attrs.define
class _Guesses:
    """Wrong passwords from one address: consecutive ones, those pending, and when the last of these is answered."""

    failures: int = 0
    pending: int = 0
    answered_at: float = 0.0  # monotonic


@attrs.define
class Access:
    """Authenticates requests and signs cookies.

    Attributes:
        token: Secret of the printed address, and of programs as a bearer token.
        password: Accepted instead of the token.
        cookie: Name of the cookie, which includes the port, since browsers send cookies to all ports of a host.
        path: Path attribute of the cookie.
        is_secure: Whether browsers may send the cookie over TLS only.
        key: Secret key that signs cookies.
    """

    token: str = attrs.field(repr=False)
    password: str | None = attrs.field(repr=False)
    cookie: str
    path: str
    is_secure: bool
    key: bytes = attrs.field(repr=False)
    _guesses: OrderedDict[str, _Guesses] = attrs.field(factory=OrderedDict, init=False, repr=False)
    _delayed: set[asyncio.Future[None]] = attrs.field(factory=set, init=False, repr=False)
    _is_closed: bool = attrs.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, settings: Settings, port: int | None = None, key: bytes | None = None) -> Access:
        """Returns the authentication of an app on a port; without a token or a key for cookies they are random."""
        # A new configured token or password invalidates earlier cookies; a random token does not, so that open pages
        # keep working after the app is restarted.
        chosen = f"{settings.password or ''}\0{settings.token or ''}".encode()
        return cls(
            token=settings.token or secrets.token_urlsafe(32),
            password=settings.password,
            cookie=f"nnxdsl-app-{port or settings.port}",
            path=f"{settings.root}/",
            is_secure=(settings.proxy or "").startswith("https:"),
            key=hmac.digest(key or secrets.token_bytes(_KEY_BYTES), chosen, "sha256"),
        )

    async def is_signed_in(self, headers: Mapping[str, str], address: str) -> bool:
        """Whether a request from an address has a valid cookie, token or password; raises `BusyError`."""
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        if any(self._is_signed(value) for name, _, value in pairs if name == self.cookie):
            return True
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_token(credentials.strip())
        password = _basic_password(credentials) if scheme.lower() == "basic" else None
        return password is not None and await self._is_password(password, address)

    async def is_secret(self, secret: str, address: str) -> bool:
        """Whether a text from an address is the token or the password; raises `BusyError`."""
        return self.is_token(secret) or await self._is_password(secret, address)

    def is_token(self, secret: str) -> bool:
        """Whether a text is the token, which is too long to be guessed, so there is no delay."""
        return hmac.compare_digest(secret.encode(), self.token.encode())

    async def _is_password(self, secret: str, address: str) -> bool:
        """Compares at once; wrong ones of an address are answered one after another, each later than the one before."""
        if self.password is None:
            return False
        guesses = self._guesses.setdefault(address, _Guesses())
        self._guesses.move_to_end(address)
        if len(self._guesses) > MOST_ADDRESSES:
            self._guesses.popitem(last=False)
        if guesses.pending >= MOST_GUESSES:
            raise BusyError
        if hmac.compare_digest(secret.encode(), self.password.encode()):
            guesses.failures = 0
            return True
        guesses.failures += 1
        guesses.pending += 1
        now = time.monotonic()
        guesses.answered_at = max(now, guesses.answered_at) + min(SLOWEST, 0.25 * 2 ** min(guesses.failures, 10))
        try:
            await self._delay(guesses.answered_at - now)
        finally:
            guesses.pending -= 1
        return False

    async def _delay(self, seconds: float) -> None:
        """Waits, until `close` at most."""
        if self._is_closed:
            return
        end = asyncio.get_running_loop().create_future()
        self._delayed.add(end)
        try:
            await asyncio.wait((end,), timeout=seconds)
        finally:
            self._delayed.discard(end)

    def close(self) -> None:
        """Answers all wrong passwords now, so that a server that ends need not wait for them."""
        self._is_closed = True
        for end in self._delayed:
            end.set_result(None)

    # cookies

    def new_cookie(self) -> str:
        """Returns the `Set-Cookie` value of an authenticated client."""
        issued = str(int(time.time()))
        attributes = [f"{self.cookie}={issued}-{self._signature(issued)}", f"Path={self.path}", "HttpOnly"]
        attributes += ["SameSite=Strict", f"Max-Age={COOKIE_SECONDS}", *(("Secure",) if self.is_secure else ())]
        return "; ".join(attributes)

    def _is_signed(self, value: str) -> bool:
        issued, _, signature = value.partition("-")
        if not (issued.isascii() and issued.isdigit() and len(issued) < 16):
            return False
        is_ours = hmac.compare_digest(signature.encode(), self._signature(issued).encode())
        return is_ours and -60 <= time.time() - int(issued) <= COOKIE_SECONDS

    def _signature(self, issued: str) -> str:
        return hmac.new(self.key, f"{self.cookie} {issued}".encode(), hashlib.sha256).hexdigest()


def session_key(place: Path) -> bytes:
    """Returns the key that signs cookies, stored in a file so that sessions survive a restart of the app.

    If the file has another owner, is readable by others or is a link, or if the directory is not writable, a new key is
    used for this process only.
    """
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(place / "session.key", flags, 0o600), "r+b") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
            if is_ours and not status.st_mode & 0o077:
                key = file.read()
                if len(key) == _KEY_BYTES:
                    return key
                key = secrets.token_bytes(_KEY_BYTES)
                file.seek(0)
                file.truncate()
                file.write(key)
                return key
    return secrets.token_bytes(_KEY_BYTES)


def _basic_password(coded: str) -> str | None:
    try:
        return base64.b64decode(coded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
