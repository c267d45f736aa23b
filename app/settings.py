"""What an app was started with; knows no gradio."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import attrs

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@attrs.frozen(kw_only=True)
class Limits:
    """How much one app does for its visitors.

    Attributes:
        slots: Runs that the queue keeps going at the same time.
        queued: Runs that may wait.
        upload_bytes: Largest request.
        prompt_characters: Longest prompt that is answered.
        new_tokens: Longest answer.
        log_bytes: How much of a log's end is shown.
        mesh_devices: Largest mesh that is planned.
        job_seconds: How long a child process may take.
    """

    slots: int = 1
    queued: int = 100
    upload_bytes: int = 4_000_000
    prompt_characters: int = 8_000
    new_tokens: int = 1_024
    log_bytes: int = 64_000
    mesh_devices: int = 1_000_000
    job_seconds: float = 600.0


@attrs.frozen(kw_only=True)
class Settings:
    """One app.

    Attributes:
        home: Directory of all runs.
        project: Where runs are started, so that relative paths in experiments mean what they mean there.
        host: Address to listen on; another than loopback needs a password.
        port: Port; 0 takes a free one.
        read_only: Whether actions that write are left out.
        token: What whoever uses the app must have; None has a random one made.
        password: What visitors may know instead of it.
        proxy: The address under which a reverse proxy offers the app, such as `https://lab.example/nnxdsl`. Its name
            and scheme are those of requests that come through it; the app is served below its path, there and here.
        allowed_hosts: Further names under which browsers may ask for the app.
        limits: How much it does.
    """

    home: Path
    project: Path = attrs.Factory(Path.cwd)
    host: str = "127.0.0.1"
    port: int = 7860
    read_only: bool = False
    token: str | None = attrs.field(default=None, repr=False)
    password: str | None = attrs.field(default=None, repr=False)
    proxy: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    limits: Limits = Limits()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names under which browsers may ask for the app."""
        own = () if self.host in ("0.0.0.0", "::") else (self.host,)
        proxy = () if self.proxy is None else (urlsplit(self.proxy).hostname or "",)
        return tuple(dict.fromkeys((*LOOPBACK, *own, *self.allowed_hosts, *proxy)))

    @property
    def root(self) -> str:
        """The path below which the app is served, without a slash at its end; usually empty."""
        return "" if self.proxy is None else urlsplit(self.proxy).path.rstrip("/")

    @property
    def own(self) -> Path:
        """Where the app keeps what is its own: launches, drafts, the queue, cached answers."""
        return self.home / ".app"
