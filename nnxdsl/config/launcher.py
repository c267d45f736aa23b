"""Where the processes of runs are started.

The process is the same everywhere: the command `nnxdsl run`. `nnxdsl/launch` has the engines that start it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import Limit, filled, not_negative, positive
from nnxdsl.errors import Problem

memory = Limit(pattern=r"[1-9][0-9]*(M|G|T)B", words="a size such as '64GB' or '512MB'")
"""Sizes of a host's memory."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@attrs.frozen(kw_only=True)
class Launcher(Spec):
    """Where the processes of runs are started. Changes nothing in what a run computes."""

    writes_files: ClassVar[bool] = False
    """Whether it writes a file for a cluster's own tools in place of starting anything."""
    implementation: ClassVar[str] = ""
    """What implements it, as `module:name`: an engine (`launch/job.py`), or the function that writes a file."""
    library: ClassVar[str] = ""
    """The library that the engine needs."""
    extra: ClassVar[str] = ""
    """The extra of nnxdsl that installs it."""

    Local: ClassVar[type[Local]]
    Slurm: ClassVar[type[Slurm]]
    Ray: ClassVar[type[Ray]]
    Kubernetes: ClassVar[type[Kubernetes]]
    SkyPilot: ClassVar[type[SkyPilot]]


@attrs.frozen(kw_only=True)
class Local(Launcher):
    """Processes on this machine, which outlive the command that started them.

    Attributes:
        parallel: Runs at one time.
        gpus: GPUs of each run, numbered from 0 on: the first run at work has the first ones, and so on. None leaves all
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


@attrs.frozen(kw_only=True)
class Kubernetes(Launcher):
    """A JobSet (https://jobset.sigs.k8s.io), written as a file for `kubectl apply`; never submitted from here.

    Attributes:
        image: Container image with Python and nnxdsl.
        nodes: Pods; all of them are one run, by `jax.distributed`.
        volume_claim: The claim of the volume on which the runs are kept, shared by all pods; None keeps them in the
            pods, whose end is theirs.
        home: Where the volume is mounted: the directory of all runs.
        directory: The working directory of the command, against which relative paths of data are read; None for the
            image's own.
        resources: Resource requests and limits of each pod: (("nvidia.com/gpu", "8"), ("memory", "512Gi")).
        node_selector: Labels of the nodes that pods may run on: (("cloud.google.com/gke-tpu-topology", "2x4"),).
        variables: Variables of the environment, as they are: no secrets.
        secrets: Names of secrets whose entries become variables of the environment.
        namespace: Namespace; None for that of the one who applies the file.
        queue: Local queue of Kueue; None where there is no Kueue.
        retries: How often all pods are started again after a pod failed.
    """

    writes_files: ClassVar[bool] = True
    implementation: ClassVar[str] = "nnxdsl.launch.kubernetes:job_set"

    image: str = attrs.field(validator=filled)
    nodes: int = attrs.field(default=1, validator=positive)
    volume_claim: str | None = attrs.field(default=None, validator=filled)
    home: str = attrs.field(default="/runs", validator=Limit(pattern=r"/.+", words="an absolute path"))
    directory: str | None = attrs.field(default=None, validator=Limit(pattern=r"/.*", words="an absolute path"))
    resources: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    namespace: str | None = attrs.field(default=None, validator=filled)
    queue: str | None = attrs.field(default=None, validator=filled)
    retries: int = attrs.field(default=3, validator=not_negative)

    def problems(self) -> Iterable[Problem]:
        """Names are given once each; what several pods share lies on a volume."""
        if self.nodes > 1 and self.volume_claim is None:
            yield Problem("volume_claim", f"{self.nodes} nodes share the directory of runs: name a volume's claim")
        yield from _twice("resources", self.resources)
        yield from _twice("node_selector", self.node_selector)
        yield from _variables(self.variables)


@attrs.frozen(kw_only=True)
class SkyPilot(Launcher):
    """A task of SkyPilot (https://docs.skypilot.co), a file for `sky jobs launch`; never submitted from here.

    Attributes:
        accelerators: Accelerators of each node, such as "H200:8" or "tpu-v5e-8"; None for CPUs alone.
        nodes: Nodes; all of them are one run, by `jax.distributed`.
        infra: Where: "gcp", "aws/us-east-1", "k8s"; None for the cheapest.
        cpus: CPU cores of each node, "16" or "16+"; None for the default.
        memory: Gigabytes of memory of each node, "64" or "64+"; None for the default.
        disk_gigabytes: Size of the disk; None for the default.
        image: Machine or container image ("docker:..."); None for the default.
        pricing: "spot" machines may be taken away; `sky jobs launch` brings the run back.
        bucket: Storage in which the runs are kept, such as "gs://my-runs"; None keeps them on the machine, whose end is
            theirs.
        home: The directory of all runs on the machine, where the bucket is mounted.
        directory: The local directory that is copied to the machines, and the working directory of the command; "." is
            that where `sky jobs launch` is run. None copies nothing.
        setup: Lines of shell that prepare a machine.
        variables: Variables of the environment, as they are: no secrets.
        secrets: Names of variables that whoever launches the file gives with `--secret`.
        retries: How often the command is started again when it fails, under `sky jobs launch`.
    """

    writes_files: ClassVar[bool] = True
    implementation: ClassVar[str] = "nnxdsl.launch.skypilot:task"

    accelerators: str | None = attrs.field(default=None, validator=filled)
    nodes: int = attrs.field(default=1, validator=positive)
    infra: str | None = attrs.field(default=None, validator=filled)
    cpus: str | None = attrs.field(default=None, validator=Limit(pattern=r"[0-9.]+\+?", words="'16' or '16+'"))
    memory: str | None = attrs.field(default=None, validator=Limit(pattern=r"[0-9.]+\+?", words="'64' or '64+'"))
    disk_gigabytes: int | None = attrs.field(default=None, validator=positive)
    image: str | None = attrs.field(default=None, validator=filled)
    pricing: Literal["on_demand", "spot"] = "on_demand"
    bucket: str | None = attrs.field(
        default=None,
        validator=Limit(pattern=r"[a-z0-9]+://.+", words="the address of a bucket, such as 'gs://my-runs'"),
    )
    home: str = attrs.field(
        default="~/runs", validator=Limit(pattern=r"~?/.+", words="a path that begins with / or ~/")
    )
    directory: str | None = attrs.field(default=".", validator=filled)
    setup: tuple[str, ...] = ("pip install -q nnxdsl",)
    variables: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    retries: int = attrs.field(default=3, validator=not_negative)

    def problems(self) -> Iterable[Problem]:
        """Names are given once each; what several machines share lies in a bucket."""
        if self.nodes > 1 and self.bucket is None:
            yield Problem("bucket", f"{self.nodes} nodes share the directory of runs: name a bucket")
        yield from _variables(self.variables)
        for index, name in enumerate(self.secrets):
            if not _VARIABLE.fullmatch(name):
                yield Problem(f"secrets.{index}", f"expected the name of a variable, got {name!r}")
            if name in self.secrets[:index] or any(name == variable for variable, _ in self.variables):
                yield Problem(f"secrets.{index}", f"{name!r} is given twice")


def _variables(pairs: tuple[tuple[str, str], ...]) -> Iterable[Problem]:
    yield from _twice("variables", pairs)
    for index, (name, _) in enumerate(pairs):
        if not _VARIABLE.fullmatch(name):
            yield Problem(f"variables.{index}.0", f"expected the name of a variable, got {name!r}")


def _twice(path: str, pairs: tuple[tuple[str, str], ...]) -> Iterable[Problem]:
    names = [name for name, _ in pairs]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"{path}.{index}.0", f"{name!r} is given twice")
