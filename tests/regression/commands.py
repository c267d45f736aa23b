"""What all cases do by the command line: run an experiment in a home of its own, read what was written."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import nnxdsl.cli.dispatch
from nnxdsl import Experiment, to_json


def command(*argv: str) -> str:
    """What a command of `nnxdsl` prints on standard output.

    Raises:
        RuntimeError: it was refused or failed; with all that it printed.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = nnxdsl.cli.dispatch.main(list(argv))
    if code:
        raise RuntimeError(f"nnxdsl {' '.join(argv)}: exit code {code}\n{out.getvalue()}{err.getvalue()}")
    return out.getvalue()


def write(experiment: Experiment) -> Path:
    """The experiment as a JSON file, which the command line reads."""
    file = Path(f"{experiment.name}.json")
    file.write_text(to_json(experiment), encoding="utf-8")
    return file


def run(experiment: Experiment) -> Path:
    """Runs an experiment in a home of its own; its directory."""
    home = Path("homes") / experiment.name
    command("run", str(write(experiment)), "--quiet", "--home", str(home))
    return home / experiment.id


def newest_checkpoint(directory: Path) -> dict[str, Any]:
    """Every array of the newest checkpoint of a run, by group and path."""
    return arrays_below(max((directory / "checkpoints").iterdir()) / "arrays")


def arrays_below(directory: Path) -> dict[str, Any]:
    """Every array below a directory that orbax has written, by group and path."""
    result: dict[str, Any] = {}
    groups = sorted(path for path in directory.iterdir() if (path / "_METADATA").exists())
    for group in groups or [directory]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shardings are read from the file: the devices are those that wrote it
            tree = ocp.PyTreeCheckpointer().restore(group.absolute())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            result[f"{group.name}{jax.tree_util.keystr(path)}"] = jax.device_get(leaf)
    return result
