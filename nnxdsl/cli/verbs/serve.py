"""Answer OpenAI's protocol over HTTP with a run, a directory, or a model of the Hub."""

from __future__ import annotations

import contextlib
import os
import socket
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nnxdsl.cli.arguments import UsageError, add_allow, add_home
from nnxdsl.cli.exit_codes import INTERRUPTED
from nnxdsl.errors import RunError

KEY = "NNXDSL_API_KEY"
"""The environment variable with the key that requests must have."""
GRACE = 5
"""Seconds that open requests have to end once the server is told to."""
LOCAL = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_allow(parser)
    if parser.get_default("experiment") is None:
        help_text = "run id, run directory or a step of it, directory in the Hub's format, or repository on the Hub"
        parser.add_argument("source", metavar="RUN-or-DIR", help=help_text)
    parser.add_argument("--host", default=LOCAL[0], help=f"address to listen at (default: {LOCAL[0]})")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; 0 for a free one (default: 8000)")
    parser.add_argument("--name", help="what clients call the model (default: the name of RUN-or-DIR)")
    help_text = "load new weights from directories below it, as a training run with Engine.Server asks (default: never)"
    parser.add_argument("--weights-directory", type=Path, metavar="DIR", help=help_text)
    dtypes = {"default": "float32", "choices": ("float32", "bfloat16")}
    parser.add_argument("--dtype", **dtypes, help="of weights and activations (default: float32)")
    help_text = "of keys and values in the cache (default: that of activations)"
    parser.add_argument("--kv-cache-dtype", choices=("int8",), help=help_text)


def run(args: Namespace) -> int:
    """Serves until it is interrupted."""
    target = args.source if args.experiment is None else args.experiment.id
    key = os.environ.get(KEY) or None
    if args.host not in LOCAL and key is None:
        raise UsageError(f"--host {args.host}: others reach the server; set {KEY}, the key that requests must have")
    try:
        import uvicorn

        from nnxdsl.serve.http import make_app
    except ImportError as error:
        raise RunError(f"{error.name} is not installed; write: pip install 'nnxdsl[serve]'") from error
    from nnxdsl.generate.pretrained import load
    from nnxdsl.runtime.compile_cache import compile_cache
    from nnxdsl.terminal.display import Display

    if args.weights_directory is not None:
        args.weights_directory.mkdir(parents=True, exist_ok=True)
    listener = _listener(args.host, args.port)
    is_id = Path(target).name == target and target != ".." and (args.home / target).is_dir()
    place = Path(args.home / target if is_id else target)
    name = args.name or (place.resolve().name if place.is_dir() else target)
    with Display() as display, compile_cache(args.home, display.say):
        phase = display.begin(f"loading {target}")
        model = load(place if place.is_dir() else target, dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype)
        _ = model.sampler  # opens the tokenizer as well: what cannot answer is not served
        display.end(phase)
        app = make_app(model, name, key, args.weights_directory)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE)
        host = f"[{args.host}]" if ":" in args.host else args.host
        display.say(f"{name} is served at http://{host}:{listener.getsockname()[1]}/v1")
        with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn once the server has ended
            uvicorn.Server(config).run([listener])
            return 0
    return INTERRUPTED


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise RunError(
            f"{host}:{port}: cannot listen there: {error}; choose another --port, 0 for a free one"
        ) from None
