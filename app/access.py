"""Who may use the app: whoever has its token or its password, and then a cookie; knows no page and no gradio.

A machine has other accounts, and each of them can reach a port on loopback, so every request needs one of:

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
from collections.abc import Mapping
from pathlib import Path

import attrs

from .settings import Settings

COOKIE_SECONDS = 30 * 24 * 3600
SLOWEST = 8.0
MOST_GUESSES = 20
"""Wrong or unchecked passwords that may wait at the same time; more are refused without being looked at."""

_KEY_BYTES = 32


class BusyError(Exception):
    """Too many passwords wait to be checked."""


@attrs.define
class Access:
    """Checks who asks, and signs cookies.

    Attributes:
        token: What programs and the printed address carry.
        password: What visitors may know instead.
        cookie: The cookie's name; it holds the port, since browsers send cookies to all ports of a host.
        path: The path that the cookie is for.
        is_secure: Whether browsers may send the cookie over TLS only.
        key: Signs cookies.
        failures: Wrong passwords in a row; each makes the next answer slower.
    """

    token: str = attrs.field(repr=False)
    password: str | None = attrs.field(repr=False)
    cookie: str
    path: str
    is_secure: bool
    key: bytes = attrs.field(repr=False)
    failures: int = 0
    _turn: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False, repr=False)
    _guesses: int = attrs.field(default=0, init=False)

    @classmethod
    def of(cls, settings: Settings, port: int | None = None, key: bytes | None = None) -> Access:
        """The access to one app.

        Args:
            settings: Of the app; without a token in them a random one is made.
            port: Where it listens, if not where the settings say.
            key: Signs cookies; random by default.
        """
        # A token or password that a person chose ends the cookies of the one before; a random token does not, so that
        # pages which are open when the app is started again go on by themselves.
        chosen = f"{settings.password or ''}\0{settings.token or ''}".encode()
        return cls(
            token=settings.token or secrets.token_urlsafe(32),
            password=settings.password,
            cookie=f"nnxdsl-app-{port or settings.port}",
            path=f"{settings.root}/",
            is_secure=(settings.proxy or "").startswith("https:"),
            key=hmac.digest(key or secrets.token_bytes(_KEY_BYTES), chosen, "sha256"),
        )

    async def is_signed_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries a cookie, a token or a password that is right.

        Raises:
            BusyError: Too many passwords wait to be checked.
        """
        if self._has_cookie(headers.get("cookie", "")):
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_token(given.strip())
        password = _basic_password(given) if scheme.lower() == "basic" else None
        return password is not None and await self._is_password(password)

    async def is_secret(self, given: str) -> bool:
        """Whether a text is the token, or the password.

        Raises:
            BusyError: Too many passwords wait to be checked.
        """
        return self.is_token(given) or await self._is_password(given)

    def is_token(self, given: str) -> bool:
        """Whether a text is the token; it is too long to be guessed, so nobody has to wait."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    async def _is_password(self, given: str) -> bool:
        """One password after another is checked, and who was wrong holds up the next: in parallel is no faster."""
        if self.password is None:
            return False
        if self._guesses >= MOST_GUESSES:
            raise BusyError
        self._guesses += 1
        try:
            async with self._turn:
                if hmac.compare_digest(given.encode(), self.password.encode()):
                    self.failures = 0
                    return True
                self.failures += 1
                await asyncio.sleep(min(SLOWEST, 0.25 * 2 ** min(self.failures, 10)))
                return False
        finally:
            self._guesses -= 1

    # cookies

    def new_cookie(self) -> str:
        """A `Set-Cookie` for whoever has shown the token or the password."""
        issued = str(int(time.time()))
        words = [f"{self.cookie}={issued}-{self._signature(issued)}", f"Path={self.path}", "HttpOnly"]
        words += ["SameSite=Strict", f"Max-Age={COOKIE_SECONDS}", *(("Secure",) if self.is_secure else ())]
        return "; ".join(words)

    def _has_cookie(self, header: str) -> bool:
        pairs = (part.strip().partition("=") for part in header.split(";"))
        return any(self._is_signed(value) for name, _, value in pairs if name == self.cookie)

    def _is_signed(self, value: str) -> bool:
        issued, _, signature = value.partition("-")
        if not (issued.isascii() and issued.isdigit() and len(issued) < 16):
            return False
        is_ours = hmac.compare_digest(signature.encode(), self._signature(issued).encode())
        return is_ours and -60 <= time.time() - int(issued) <= COOKIE_SECONDS

    def _signature(self, issued: str) -> str:
        return hmac.new(self.key, f"{self.cookie} {issued}".encode(), hashlib.sha256).hexdigest()


def session_key(place: Path) -> bytes:
    """The secret that signs cookies, kept in a file so that open pages outlive a restart of the app.

    A file that others own, can read or have linked is not used, nor is a directory that cannot be written: then the
    secret is this process's alone.
    """
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(place / "session.key", flags, 0o600), "r+b") as file:
            found = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
            if is_ours and not found.st_mode & 0o077:
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
