"""Start the web app: launch, watch and compare runs in a browser."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from nnxdsl import app


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments of the app."""
    app.module("command").add_arguments(parser)


def run(args: Namespace) -> int:
    """Serves the app until it is interrupted."""
    return app.module("command").run(args)
