"""The engine of a launcher; loads the libraries of that one alone."""

from __future__ import annotations

import importlib

from nnxdsl.config.launcher import Launcher, Local, Ray, Slurm
from nnxdsl.errors import RunError
from nnxdsl.launch.job import Engine
from nnxdsl.launch.local import LocalEngine

NEEDS = {Slurm: ("slurm", "submitit", "SlurmEngine"), Ray: ("ray", "ray", "RayEngine")}
"""By launcher: the extra (its module here is `<extra>_engine`), the library, the class."""

UNBOUNDED = 1_000_000
"""Jobs at one time where nobody said how many: the cluster has a queue."""


def open_engine(launcher: Launcher) -> Engine:
    """The engine of a launcher, connected to where it starts things.

    Raises:
        RunError: its library is not installed, its cluster cannot be reached, or it starts nothing.
    """
    if isinstance(launcher, Local):
        return LocalEngine(launcher)
    if launcher.writes_files:
        name = type(launcher).__qualname__
        raise RunError(f"{name} starts nothing, it writes a file: nnxdsl launch FILE --write job.yaml")
    if type(launcher) not in NEEDS:
        raise RunError(f"{type(launcher).__qualname__} is no launcher that nnxdsl can start runs with")
    extra, library, name = NEEDS[type(launcher)]
    try:
        importlib.import_module(library)
    except ImportError as error:
        said = f"{type(launcher).__qualname__} needs {library}: pip install 'nnxdsl[{extra}]' ({error})"
        raise RunError(said) from error
    return getattr(importlib.import_module(f"nnxdsl.launch.{extra}_engine"), name)(launcher)
