"""Creates the engine of a launcher; imports its library only then."""

from __future__ import annotations

import importlib
from typing import Any

from nnxdsl.config.launcher import Launcher
from nnxdsl.errors import RunError
from nnxdsl.launch.job import Engine

UNBOUNDED = 1_000_000
"""Concurrent jobs where the launcher sets no limit: the cluster has a queue."""


def open_engine(launcher: Launcher) -> Engine:
    """Creates the engine of a launcher, connected to its cluster.

    Raises:
        RunError: its library is not installed, or its cluster cannot be reached.
    """
    name = type(launcher).__qualname__
    try:
        importlib.import_module(launcher.library or __name__)
    except ImportError as error:
        message = f"{name} needs {launcher.library}: pip install 'nnxdsl[{launcher.extra}]' ({error})"
        raise RunError(message) from error
    return _implementation(launcher)(launcher)


def _implementation(launcher: Launcher) -> Any:
    module, _, name = launcher.implementation.partition(":")
    if not name:
        raise RunError(f"{type(launcher).__qualname__} names no implementation (`implementation = 'module:name'`)")
    return getattr(importlib.import_module(module), name)
