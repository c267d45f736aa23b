"""What the files for a cluster's own tools share: names, the heading, the port of the first process.

They hold the experiment itself and the plain command. Several machines get the address of the first one as a flag: what
`jax.distributed` detects by itself needs rights that pods seldom have.
"""

from __future__ import annotations

import re

from nnxdsl.config.experiment import Experiment

PORT = 8476
"""Where the first process listens."""
LONGEST_NAME = 40
"""Of a JobSet: its pods have longer ones, and 63 characters are the limit of a host's name."""


def heading(experiment: Experiment, command: str) -> str:
    """The first line of a file, with the command that submits it."""
    return f"# {experiment.id}, written by nnxdsl: {command} THIS-FILE\n"


def dns_name(run: str) -> str:
    """A run's id as a DNS label (RFC 1123): the digest distinguishes names that become equal."""
    name, _, digest = run.rpartition("-")
    name = re.sub(r"[^a-z0-9-]+", "-", name)[: LONGEST_NAME - len(digest) - 2].strip("-")
    return f"{name}-{digest}" if name[:1].isalpha() else f"r-{name}-{digest}".replace("--", "-")
