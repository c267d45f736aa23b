"""Train, or resume from the run's last checkpoint."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nnxdsl.cli.arguments import add_experiment, add_json, add_quiet, experiment_of
from nnxdsl.config.experiment import Experiment
from nnxdsl.runtime import xla_flags
from nnxdsl.runtime.limits import require_address_space


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_experiment(parser)
    add_training(parser)
    parser.add_argument("--restart", action="store_true", help="move the run directory aside and start from step 0")


def add_training(parser: ArgumentParser) -> None:
    """Adds the arguments of the verbs that train."""
    add_json(parser)
    add_quiet(parser)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 in a multi-process run")
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes of this run")
    parser.add_argument("--process", type=int, metavar="I", help="index of this process, from 0")


def run(args: Namespace) -> int:
    """Train, or resume."""
    require_address_space()
    return train(experiment_of(args), args.home, args, restart=args.restart)


def train(experiment: Experiment, home: Path, args: Namespace, *, restart: bool = False) -> int:
    """Train an experiment with the arguments of `add_training`."""
    xla_flags.prepare(home, experiment.mesh.device_count)  # before jax is imported, which reads them
    from nnxdsl.cli.run import run_command
    from nnxdsl.runtime.distributed import DistributedArgs

    distributed = DistributedArgs(args.coordinator, args.processes, args.process)
    return run_command(
        experiment, home, quiet=args.quiet, restart=restart, as_json=args.json, distributed_args=distributed
    )
