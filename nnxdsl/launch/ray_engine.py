"""Runs as processes under detached actors of Ray; the one file that imports Ray.

An actor has the run's name and starts its process when it is created: a name is unique in a cluster, so that no run is
started twice. The exit code is written to the job's directory; the actor ends soon after, with or without a driver.
"""

# pyright: reportMissingImports=false
# (its library is an extra)

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nnxdsl.config.launcher import Ray
from nnxdsl.errors import RunError
from nnxdsl.launch import process
from nnxdsl.launch.engines import UNBOUNDED
from nnxdsl.launch.job import Job

NAMESPACE = "nnxdsl"
LINGER_SECONDS = 20.0
GONE_SECONDS = 10.0
"""Seconds until the name of an actor that was killed is free."""
ADDRESS_SECONDS = 600.0
"""Seconds that the processes of a run wait for the first of them to be placed."""


class _Host:
    """One process of one run, on a node that Ray has chosen."""

    def __init__(
        self,
        argv: list[str],
        cwd: str,
        variables: dict[str, str],
        directory: str,
        rank: int,
        processes: int,
        first: str,
    ) -> None:
        self._port = 0
        self._child: subprocess.Popen[bytes] | None = None
        more: list[str] = []
        if processes > 1:
            address = self._reserve_address() if rank == 0 else _address_of(first)
            more = ["--coordinator", address, "--processes", str(processes), "--process", str(rank)]
        self._ended = process.end_file(Path(directory), rank)
        self._child = process.start(
            [*argv, *more],
            process.output_file(Path(directory), rank),
            cwd=cwd if Path(cwd).is_dir() else None,
            environment={**os.environ, **variables},
            start_new_session=True,
        )
        threading.Thread(target=_wait, args=(self._child, Path(directory), rank), daemon=True).start()

    def _reserve_address(self) -> str:
        with socket.socket() as listener:
            listener.bind(("", 0))
            self._port = listener.getsockname()[1]
        return f"{ray.util.get_node_ip_address()}:{self._port}"

    def address(self) -> str:
        """Where the first process of the run listens."""
        return f"{ray.util.get_node_ip_address()}:{self._port}"

    def has_ended(self) -> bool:
        """Whether the process has ended and its exit code is written."""
        return self._ended.exists()

    def terminate(self) -> None:
        """Makes the process save and end (SIGTERM)."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)


def _address_of(name: str) -> str:
    """The address of the first process, whose actor may still wait for resources."""
    first = ray.get_actor(name, namespace=NAMESPACE)
    return str(ray.get(first.address.remote(), timeout=ADDRESS_SECONDS))


def _wait(child: subprocess.Popen[bytes], directory: Path, rank: int) -> None:
    """Writes the exit code of the process; then ends the actor, so that its resources are free without a driver."""
    code = child.wait()
    with contextlib.suppress(Exception):
        process.write_end(directory, code, rank)
    time.sleep(LINGER_SECONDS)  # a driver kills it before, without the messages that Ray prints for an exit
    os._exit(0)


class RayEngine:
    """Actors of a cluster."""

    poll_seconds = 0.5

    def __init__(self, launcher: Ray) -> None:
        """Connects to the cluster, or starts one here.

        Raises:
            RunError: there is none at the address.
        """
        self._launcher = launcher
        self.parallel, self.retries = launcher.parallel or UNBOUNDED, launcher.retries
        is_local = launcher.address == "local"
        # A run has its own environment and packages: Ray need not upload those of this process.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        options: dict[str, Any] = {"address": launcher.address, "namespace": NAMESPACE}
        options |= {"log_to_driver": False, "logging_level": "ERROR"}
        if is_local:
            options["include_dashboard"] = False
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"Launcher.Ray: no cluster at {launcher.address!r}: {error}") from error
        self._probes: dict[str, Any] = {}

    def start(self, job: Job) -> bool:
        """Creates the actors of a job; False if they exist already."""
        if self.is_active(job):
            return False
        count = self._launcher.processes
        for rank in range(count):
            process.end_file(job.directory, rank).unlink(missing_ok=True)
        group = self._reserve(job) if count > 1 else None
        host = ray.remote(_Host)
        argv, variables = job.command()[1:], job.forwarded()
        for rank in range(count):
            options: dict[str, Any] = {
                "name": _name(job, rank),
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_restarts": 0,
                "num_cpus": self._launcher.cpus,
                "num_gpus": self._launcher.gpus,
                "resources": dict(self._launcher.resources),
            }
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
            host.options(**options).remote(
                argv, str(job.cwd), variables, str(job.directory), rank, count, _name(job, 0)
            )
        return True

    def is_active(self, job: Job) -> bool:
        """Whether any of its actors is waiting for resources or alive."""
        return any(self._is_alive(job, rank) for rank in range(self._launcher.processes))

    def exit_code(self, job: Job) -> int | None:
        """The exit code that the actor of the first process has written."""
        if self._launcher.processes > 1:
            self._release(job)
        return process.recorded_exit_code(job)

    def location(self, job: Job) -> str:
        """The name of its actor."""
        return f"Ray actor {_name(job, 0)}"

    def terminate(self, job: Job) -> None:
        """Makes its processes save and end; kills actors that still wait for resources."""
        for rank in range(self._launcher.processes):
            with contextlib.suppress(ValueError, RayError):
                actor = ray.get_actor(_name(job, rank), namespace=NAMESPACE)
                try:
                    ray.get(actor.terminate.remote(), timeout=5)
                except GetTimeoutError:
                    ray.kill(actor)

    def close(self) -> None:
        """Leaves the cluster; one that was started here ends."""
        ray.shutdown()

    def _is_alive(self, job: Job, rank: int) -> bool:
        name = _name(job, rank)
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            self._probes.pop(name, None)
            return False
        probe = self._probes.get(name)
        if probe is None:
            probe = self._probes[name] = actor.has_ended.remote()
        ready, _ = ray.wait([probe], timeout=0)
        if not ready:
            return True  # it waits for resources, or has not answered yet
        del self._probes[name]
        try:
            if ray.get(probe):
                self._end(actor, name)
                return False
        except RayError as error:
            if "creation task" in str(error):  # the node could not start it: the reason is reported only here
                with job.output.open("a", encoding="utf-8") as output:
                    output.write(f"{error}\n")
            return False
        return True

    def _end(self, actor: Any, name: str) -> None:
        """Kills an actor, and returns when its name is free."""
        ray.kill(actor)
        end = time.monotonic() + GONE_SECONDS
        with contextlib.suppress(ValueError):
            while time.monotonic() < end:
                ray.get_actor(name, namespace=NAMESPACE)
                time.sleep(0.05)

    def _reserve(self, job: Job) -> Any:
        """A placement group for all processes of a run: two partly placed runs would deadlock."""
        self._release(job)
        each = {"CPU": self._launcher.cpus, "GPU": self._launcher.gpus, **dict(self._launcher.resources)}
        bundle = {name: amount for name, amount in each.items() if amount}
        return placement_group([bundle or {"CPU": 0.001}] * self._launcher.processes, name=job.run, lifetime="detached")

    def _release(self, job: Job) -> None:
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(job.run))


def _name(job: Job, rank: int) -> str:
    return job.run if rank == 0 else f"{job.run}.{rank}"
