"""Launchers: where the processes of runs are started.

The process is the same everywhere: the command `nnxdsl run`. `nnxdsl/launch` has the engines that start it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import Limit, filled, not_negative, positive
from nnxdsl.errors import Problem

memory = Limit(pattern=r"[1-9][0-9]*(M|G|T)B", description="a size such as '64GB' or '512MB'")
"""Sizes of a host's memory."""


@attrs.frozen(kw_only=True)
class Launcher(Spec):
    """Starts the processes of runs. Changes nothing in what a run computes."""

    implementation: ClassVar[str] = ""
    """The engine that implements it (`launch/job.py`), as `module:name`."""
    library: ClassVar[str] = ""
    """The library that the engine needs."""
    extra: ClassVar[str] = ""
    """The extra of nnxdsl that installs it."""

    Local: ClassVar[type[Local]]
    Slurm: ClassVar[type[Slurm]]
    Ray: ClassVar[type[Ray]]


@attrs.frozen(kw_only=True)
class Local(Launcher):
    """Processes on this machine, which outlive the command that started them.

    Attributes:
        parallel: Maximum number of concurrent runs.
        gpus: GPUs of each run, numbered from 0: the first concurrent run has the first ones, and so on. None leaves all
            of them to every run.
        retries: How often a run that was killed, or ended by SIGTERM, is started again; it resumes from its last
            checkpoint.
    """

    implementation: ClassVar[str] = "nnxdsl.launch.local:LocalEngine"

    parallel: int = attrs.field(default=1, validator=positive)
    gpus: int | None = attrs.field(default=None, validator=positive)
    retries: int = attrs.field(default=1, validator=not_negative)


@attrs.frozen(kw_only=True)
class Slurm(Launcher):
    """Jobs of Slurm, submitted with submitit (the extra `slurm`); the home of runs lies on a file system of all nodes.

    Attributes:
        partition: Partition; None for the cluster's default.
        account: Account that is charged; None for the user's default.
        qos: Quality of service; None for the default.
        nodes: Nodes of each run.
        tasks_per_node: Processes on each node; all of them are one run, by `jax.distributed`.
        gpus_per_node: GPUs on each node; None requests none.
        cpus_per_task: CPU cores of each process; None for the cluster's default.
        memory: Memory on each node, such as "64GB"; None for the cluster's default.
        minutes: Longest time of a job. A job that comes near it saves a checkpoint and is queued again.
        setup: Lines of shell before the command, such as "module load cuda".
        options: Further options of `sbatch` by name, without their dashes: (("constraint", "h200"),).
        retries: How often a run is submitted again that came to its time limit, was preempted or killed.
        parallel: Jobs in the queue at one time; None for all.
        cluster: "slurm", or "local" for processes of this machine under submitit's control, to try a set-up.
    """

    implementation: ClassVar[str] = "nnxdsl.launch.slurm_engine:SlurmEngine"
    library: ClassVar[str] = "submitit"
    extra: ClassVar[str] = "slurm"

    partition: str | None = attrs.field(default=None, validator=filled)
    account: str | None = attrs.field(default=None, validator=filled)
    qos: str | None = attrs.field(default=None, validator=filled)
    nodes: int = attrs.field(default=1, validator=positive)
    tasks_per_node: int = attrs.field(default=1, validator=positive)
    gpus_per_node: int | None = attrs.field(default=None, validator=positive)
    cpus_per_task: int | None = attrs.field(default=None, validator=positive)
    memory: str | None = attrs.field(default=None, validator=memory)
    minutes: int = attrs.field(default=240, validator=positive)
    setup: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    retries: int = attrs.field(default=3, validator=not_negative)
    parallel: int | None = attrs.field(default=None, validator=positive)
    cluster: Literal["slurm", "local"] = "slurm"

    def problems(self) -> Iterable[Problem]:
        """Settings that this machine's processes cannot have are refused."""
        return gather(self._check_local, self._check_options)

    def _check_local(self) -> Iterable[Problem]:
        if self.cluster != "local":
            return
        for name in ("nodes", "tasks_per_node"):
            if getattr(self, name) != 1:
                yield Problem(name, "must be 1 with cluster='local', where one process is one run")
        for name in ("partition", "account", "qos", "cpus_per_task", "memory"):
            if getattr(self, name) is not None:
                yield Problem(name, "has no effect with cluster='local'")
        if self.options:
            yield Problem("options", "has no effect with cluster='local'")

    def _check_options(self) -> Iterable[Problem]:
        for index, (name, _) in enumerate(self.options):
            if not name.replace("-", "").replace("_", "").isalnum() or name.startswith("-"):
                yield Problem(f"options.{index}.0", f"expected the name of an option of sbatch, got {name!r}")


@attrs.frozen(kw_only=True)
class Ray(Launcher):
    """Actors of Ray (the extra `ray`), each of which runs the command; the home of runs lies where all nodes see it.

    Attributes:
        address: A cluster's address; "auto" for the one that this machine belongs to, "local" for one that is started
            here and ends with the command.
        cpus: CPU cores that are set aside for each process.
        gpus: GPUs of each process.
        resources: Further resources of each process by name: (("TPU", 4.0),).
        processes: Processes of each run; they are one run, by `jax.distributed`.
        retries: How often a run is started again that was killed, or whose node went away.
        parallel: Runs at one time; None for as many as the cluster has room for.
    """

    implementation: ClassVar[str] = "nnxdsl.launch.ray_engine:RayEngine"
    library: ClassVar[str] = "ray"
    extra: ClassVar[str] = "ray"

    address: str = attrs.field(default="auto", validator=filled)
    cpus: float = attrs.field(default=1.0, validator=not_negative)
    gpus: float = attrs.field(default=0.0, validator=not_negative)
    resources: tuple[tuple[str, float], ...] = ()
    processes: int = attrs.field(default=1, validator=positive)
    retries: int = attrs.field(default=3, validator=not_negative)
    parallel: int | None = attrs.field(default=None, validator=positive)
