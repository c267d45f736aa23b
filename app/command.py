"""`nnxdsl app`: its arguments and its server, which runs outlive. Imports gradio last, since that is slow."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from nnxdsl import app
from nnxdsl.cli.arguments import add_allow, add_home
from nnxdsl.errors import RunError

from .settings import LOOPBACK, PATHS, TOKEN_VARIABLE, Limits, Settings

PASSWORD_VARIABLE = "NNXDSL_APP_PASSWORD"
SHORTEST_TOKEN = 16


def run(args: Namespace) -> int:
    """Serves the app until SIGINT or SIGTERM, which end the process with exit code 0."""
    settings = settings_of(args)
    sys.path.append(str(settings.recipes))  # classes beside a recipe, if --allow names their module
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--home {settings.home}: cannot be created: {error.strerror}") from error
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    app.module("site").serve(settings)
    return 0


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments of `nnxdsl app`."""
    add_home(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any other than 127.0.0.1 requires a password"
    )
    parser.add_argument("--port", type=int, default=7860, help="port (default: 7860; 0: any free one)")
    parser.add_argument("--read-only", action="store_true", help="disable all actions that write")
    parser.add_argument("--password-file", type=Path, help=f"file with the password; or set {PASSWORD_VARIABLE}")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="additional host name to accept in requests"
    )
    parser.add_argument(
        "--proxy", metavar="URL", help="public URL of a reverse proxy before the app, such as https://lab/nnxdsl"
    )
    parser.add_argument("--slots", type=int, default=1, help="concurrent runs of the queue (default: 1)")
    parser.add_argument(
        "--alert-command",
        metavar="CMD",
        help="command, split as a shell would and run without one, for each alert (metrics that are NaN, a run that is "
        "stalled, lost, failed or finished), which it reads as JSON",
    )
    parser.add_argument(
        "--alert-webhook", metavar="URL", help="http or https URL that each alert is posted to, as JSON"
    )
    add_allow(parser)


def settings_of(args: Namespace) -> Settings:
    """The app's settings from arguments and environment; raises if others could reach it without a password."""
    password = _password(args.password_file)
    if args.host not in LOOPBACK and password is None:
        raise RunError(
            f"--host {args.host} would open the app to others: set {PASSWORD_VARIABLE} or give --password-file, and "
            "put TLS before it; or keep 127.0.0.1 and use `ssh -L`"
        )
    if args.slots < 1:
        raise RunError(f"--slots: expected a value > 0, got {args.slots}")
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token and len(token) < SHORTEST_TOKEN:
        raise RunError(
            f"{TOKEN_VARIABLE} has {len(token)} characters; expected {SHORTEST_TOKEN} or more: whoever guesses it "
            "can start processes as you. Unset it to generate a random one"
        )
    if args.alert_webhook is not None:  # errors are without it, which may hold a secret
        _http(
            args.alert_webhook, "--alert-webhook", "a URL such as https://lab.example/alerts, without user and password"
        )
    return Settings(
        home=args.home.absolute(),
        project=Path.cwd(),
        host=args.host,
        port=args.port,
        read_only=args.read_only,
        token=token or None,
        password=password,
        proxy=None if args.proxy is None else _proxy(args.proxy),
        allowed_hosts=tuple(args.allow_host),
        limits=Limits(slots=args.slots),
        alert_command=() if args.alert_command is None else _alert_command(args.alert_command),
        alert_webhook=args.alert_webhook,
    )


def _http(url: str, option: str, expected: str) -> SplitResult:
    """The parts of an HTTP URL without a user."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError as error:
        raise RunError(f"{option}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not url.isprintable():
        raise RunError(f"{option}: expected {expected}")
    return parts


def _proxy(url: str) -> str:
    expected = "an address such as https://lab.example or https://lab.example/nnxdsl"
    parts = _http(url, f"--proxy {url}", expected)
    if parts.query or parts.fragment or not PATHS.fullmatch(parts.path):
        raise RunError(f"--proxy {url}: expected {expected}")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _alert_command(text: str) -> tuple[str, ...]:
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise RunError(f"--alert-command {text}: {error}") from error
    if not argv or shutil.which(argv[0]) is None:
        raise RunError(f"--alert-command {text}: expected a command that can be executed, with its arguments")
    return argv


def _password(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise RunError(f"--password-file {file}: cannot be read: {error}") from error
    if not text:
        raise RunError(f"--password-file {file}: file is empty")
    return text
