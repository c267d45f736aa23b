"""Settings of an app."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import attrs

TOKEN_VARIABLE = "NNXDSL_APP_TOKEN"
ANY = ("0.0.0.0", "::")  # addresses for all interfaces
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATHS = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")  # paths below which pages may be served


@attrs.frozen(kw_only=True)
class Limits:
    """Resource limits of an app."""

    slots: int = 1  # concurrent runs of the queue
    queued: int = 100
    upload_bytes: int = 4_000_000  # of a request
    prompt_characters: int = 8_000
    new_tokens: int = 1_024
    log_bytes: int = 64_000  # that are shown from the end of a log
    mesh_devices: int = 1_000_000  # of a planned mesh
    job_seconds: float = 600.0  # timeout of a child process


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of an app."""

    home: Path  # of all runs
    project: Path = attrs.Factory(Path.cwd)  # working directory of runs, which relative paths in experiments refer to
    host: str = "127.0.0.1"  # address to listen on; any other than loopback requires a password
    port: int = 7860  # 0 chooses a free one
    read_only: bool = False  # whether actions that write are disabled
    token: str | None = attrs.field(default=None, repr=False)  # of all clients; None generates a random one
    password: str | None = attrs.field(default=None, repr=False)  # accepted instead of the token
    # Public URL of a reverse proxy, such as https://lab.example/nnxdsl. Requests through it have its host and scheme;
    # the app is served below its path, on the proxy and on its own port.
    proxy: str | None = None
    path: str = ""  # below which the pages are mounted in another app, instead of that of a proxy
    allowed_hosts: tuple[str, ...] = ()  # further host names that are accepted in requests
    limits: Limits = Limits()
    alert_command: tuple[str, ...] = ()  # arguments of a command that is run for each alert; empty for none
    alert_webhook: str | None = attrs.field(default=None, repr=False)  # URL for each alert, which contains secrets

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names that are accepted in requests."""
        hosts = () if self.host in ANY else (self.host,)
        proxy = () if self.proxy is None else (urlsplit(self.proxy).hostname or "",)
        return tuple(dict.fromkeys((*LOOPBACK, *hosts, *self.allowed_hosts, *proxy)))

    @property
    def root(self) -> str:
        """Root path of the app without a trailing slash; usually empty."""
        return self.path if self.proxy is None else urlsplit(self.proxy).path.rstrip("/")

    @property
    def recipes(self) -> Path:
        """Directory of the project's recipes."""
        return self.project / "experiments"

    @property
    def app_directory(self) -> Path:
        """Directory of the app's own files: launches, drafts, queue, cached outputs."""
        return self.home / ".app"

    @property
    def demo(self) -> Path:
        """Directory of the demo's rows."""
        return self.app_directory / "demo"
