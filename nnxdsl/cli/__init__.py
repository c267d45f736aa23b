"""The command line: arguments to experiments to one of a few verbs. Loads jax only for the verbs that compute."""

from nnxdsl.cli.dispatch import load, load_module, main, main_of, override, run_directory

__all__ = ["load", "load_module", "main", "main_of", "override", "run_directory"]
