"""Command line: one module per verb in `verbs/`. Imports jax only for verbs that compute."""

from nnxdsl.cli.dispatch import main, main_of
from nnxdsl.cli.load import load, load_module, override, run_directory

__all__ = ["load", "load_module", "main", "main_of", "override", "run_directory"]
