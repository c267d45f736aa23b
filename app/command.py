"""`nnxdsl app`: its arguments, and a server whose end touches no run. Imports gradio last, since it is slow."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import urlsplit

from nnxdsl.cli.arguments import add_allow, add_home
from nnxdsl.errors import RunError

from .settings import LOOPBACK, Limits, Settings

PASSWORD_VARIABLE = "NNXDSL_APP_PASSWORD"
TOKEN_VARIABLE = "NNXDSL_APP_TOKEN"
SHORTEST_TOKEN = 16
PROXY_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")


def run(args: Namespace) -> int:
    """Serves the app until it is interrupted; returns the process's exit code."""
    return serve(settings_of(args))


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments of `nnxdsl app`."""
    add_home(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than 127.0.0.1 need a password"
    )
    parser.add_argument("--port", type=int, default=7860, help="port (default: 7860; 0: any free one)")
    parser.add_argument("--read-only", action="store_true", help="show runs, start and change none")
    parser.add_argument("--password-file", type=Path, help=f"file with the password; or set {PASSWORD_VARIABLE}")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="further name of this machine"
    )
    parser.add_argument(
        "--proxy", metavar="URL", help="address under which a reverse proxy offers the app, such as https://lab/nnxdsl"
    )
    parser.add_argument("--slots", type=int, default=1, help="runs that the queue keeps going at once (default: 1)")
    add_allow(parser)


def settings_of(args: Namespace) -> Settings:
    """The app's settings from its arguments and environment variables.

    Raises:
        RunError: they would open the app to others without a password.
    """
    password = _password(args.password_file)
    if args.host not in LOOPBACK and password is None:
        raise RunError(
            f"--host {args.host} would open the app to others: set {PASSWORD_VARIABLE} or give --password-file, and "
            "put TLS before it; or keep 127.0.0.1 and use `ssh -L`"
        )
    if args.slots < 1:
        raise RunError(f"--slots: expected a value > 0, got {args.slots}")
    return Settings(
        home=args.home.absolute(),
        project=Path.cwd(),
        host=args.host,
        port=args.port,
        read_only=args.read_only,
        token=_token(),
        password=password,
        proxy=None if args.proxy is None else _proxy(args.proxy),
        allowed_hosts=tuple(args.allow_host),
        limits=Limits(slots=args.slots),
    )


def _token() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token and len(token) < SHORTEST_TOKEN:
        raise RunError(
            f"{TOKEN_VARIABLE} has {len(token)} characters; expected {SHORTEST_TOKEN} or more, as whoever guesses it "
            "may start processes as you. Unset it to have a random one made"
        )
    return token or None


def _proxy(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is no number
    except ValueError as error:
        raise RunError(f"--proxy {url}: {error}") from error
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc) and PROXY_PATH.fullmatch(parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise RunError(f"--proxy {url}: expected an address such as https://lab.example or https://lab.example/nnxdsl")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _password(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise RunError(f"--password-file {file}: cannot be read: {error}") from error
    if not text:
        raise RunError(f"--password-file {file}: is empty")
    return text


def serve(settings: Settings) -> int:
    """Serves until SIGINT or SIGTERM, and returns 0.

    Raises:
        RunError: gradio is missing, the port is taken, or the home cannot be made.
    """
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--home {settings.home}: cannot be made: {error.strerror}") from error
    try:
        site_module = importlib.import_module(f"{__package__}.site")
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise RunError("the app needs gradio: pip install 'nnxdsl[app]'") from error
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ended.set())
    try:
        app = site_module.served(settings)
    except OSError as error:
        raise RunError(f"--port {settings.port}: {error}; take another one, or --port 0") from error
    password_note = "; it asks for its password" if settings.password else ""
    password_note = password_note or (f"; it asks for the token of {TOKEN_VARIABLE}" if settings.token else "")
    sys.stdout.write(
        f"nnxdsl app on {app.address} (runs in {settings.home}){password_note}; Ctrl-C ends it, runs go on\n"
    )
    sys.stdout.flush()
    ended.wait()
    app.close()
    return 0
