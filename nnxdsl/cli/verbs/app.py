"""Start the web app: launch, watch and compare runs in a browser."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from nnxdsl.errors import RunError


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments of the app."""
    _command().add_arguments(parser)


def run(args: Namespace) -> int:
    """Serves the app until it is interrupted."""
    return _command().run(args)


def _command() -> Any:
    """Import the app's `command` module from `nnxdsl/_app` (installed package) or `app` (checkout).

    It is imported by path, since the name `app` may belong to another package.

    Raises:
        RunError: neither directory exists.
    """
    package = Path(__file__).parents[2]
    folders = package / "_app", package.parent / "app"
    folder = next((path for path in folders if (path / "command.py").is_file()), None)
    if folder is None:
        raise RunError(f"the app's files are missing: there is no {folders[0]}; install nnxdsl again")
    name = "nnxdsl._app"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.command")
