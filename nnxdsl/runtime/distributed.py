"""The processes of `jax.distributed` in one run: joining, barriers, votes, and detection of failed peers.

Each process has some of the devices, and all execute the same program in the same order. With a single process
everything here is a no-op.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import attrs
import jax
import numpy as np
from jax._src import distributed  # the coordinator's keys and barriers have no public API; orbax uses it as well
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runtime.xla_flags import platform
from nnxdsl.storage.failpoints import hit_failpoint

T = TypeVar("T")

JOIN_SECONDS = 300
"""Timeout of joining the other processes."""

LINGER_SECONDS = 5.0
"""How long process 0 waits for the others to exit before it does."""

LOST_SECONDS = 30.0
"""A process that sends no heartbeat for this time counts as failed."""

REPORT_SECONDS = 5.0
"""Longest time that reporting a failed process may delay the exit."""

PROCESS_0_SECONDS = 24 * 3600.0
"""Timeout of waiting for process 0; if it fails, `Watch` ends the run long before."""

_BEAT_SECONDS = 1.0
_ALIVE, _ENDED, _FAILED = "nnxdsl/alive/", "ended", "failed: "
_call_ids = itertools.count()
_peer_failure_callbacks: list[Callable[[str], object]] = []


class ProcessError(RunError):
    """The processes of a run cannot connect, or one of them has failed."""


@attrs.frozen
class DistributedArgs:
    """Flags of a run in several processes; with all None they are read from the environment.

    Attributes:
        coordinator: `host:port` of process 0, reachable from all processes.
        processes: Number of processes.
        process: Index of this process, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def distributed_args(args: DistributedArgs, environment: Mapping[str, str] = os.environ) -> DistributedArgs | None:
    """Arguments of `jax.distributed`; None for a run in one process.

    Args:
        args: Flags. They take precedence over `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, and
            those over the variables of Slurm, Open MPI, Kubernetes and Cloud TPUs, which `jax.distributed` reads.
        environment: Environment variables of this process.

    Raises:
        ProcessError: Only some of them are given, or one is invalid.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if args == DistributedArgs() and any(name in environment for name in names[1:]):
        coordinator, *numbers = (environment.get(name) for name in names)
        try:
            args = DistributedArgs(coordinator, *(None if number is None else int(number) for number in numbers))
        except ValueError as error:
            raise ProcessError(f"{' and '.join(names[1:])}: {error}") from error
    if args != DistributedArgs():
        return _checked(args)
    return DistributedArgs() if _is_one_of_many(environment) else None


def _checked(args: DistributedArgs) -> DistributedArgs | None:
    missing = [f"--{name}" for name, value in attrs.asdict(args).items() if value is None]
    if missing:
        raise ProcessError(f"{', '.join(missing)}: missing; --coordinator, --processes and --process go together")
    assert args.coordinator is not None
    assert args.processes is not None
    assert args.process is not None
    host, colon, port = args.coordinator.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ProcessError(f"--coordinator: expected host:port, got {args.coordinator!r}")
    if args.processes < 1:
        raise ProcessError(f"--processes: expected a value > 0, got {args.processes}")
    if not 0 <= args.process < args.processes:
        raise ProcessError(f"--process: expected 0 to {args.processes - 1}, got {args.process}")
    return args if args.processes > 1 else None


def _is_one_of_many(environment: Mapping[str, str]) -> bool:
    """Whether a cluster that `jax.distributed` detects has started more than one process."""

    def number(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else 0

    slurm = "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment and number("SLURM_NTASKS") > 1
    kubernetes = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    tpu = platform(environment) == "tpu" and (len(hosts) > 1 or number("MEGASCALE_NUM_SLICES") > 1)
    return slurm or number("OMPI_COMM_WORLD_SIZE") > 1 or kubernetes or tpu


def join(args: DistributedArgs) -> bool:
    """Joins the other processes of a run, before jax initializes devices; returns whether there are any.

    Raises:
        ProcessError: They cannot be reached.
    """
    resolved = distributed_args(args)
    if resolved is None or jax.distributed.is_initialized():
        return jax.distributed.is_initialized()
    # Handled by `StopRequest`: the first signal saves at a step boundary that all processes agree on (see `Vote`).
    jax.config.update("jax_enable_preemption_service", False)
    # Everything is saved before a regular exit, which need not wait long for the others.
    settings: dict[str, Any] = {"initialization_timeout": JOIN_SECONDS, "shutdown_timeout_seconds": 60}
    if resolved != DistributedArgs():
        settings |= {"coordinator_address": resolved.coordinator, "num_processes": resolved.processes}
        settings |= {"process_id": resolved.process, "cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        who = (
            "from the environment"
            if resolved == DistributedArgs()
            else f"process {resolved.process} at {resolved.coordinator}"
        )
        raise ProcessError(
            f"the processes of this run could not connect within {JOIN_SECONDS} s ({who}): {_line(error)}; "
            "start all of them, with the same --coordinator, reachable from each, and a different --process each"
        ) from error
    hit_failpoint("processes-joined")
    return True


def is_process_0() -> bool:
    """Whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def is_single_process() -> bool:
    """Whether the run has no other process."""
    return jax.process_count() == 1


def on_process_0(function: Callable[[], T]) -> T:
    """Calls a function in process 0; all processes wait for it, and return its result or raise its error.

    All processes must call it in the same order.

    Args:
        function: Called in process 0 only; the other processes get its result if it is a JSON value, else None.

    Raises:
        NnxdslError: `function` raised it; in the other processes a RunError with the same message.
    """
    if is_single_process():
        return function()
    key = f"nnxdsl/on_process_0/{next(_call_ids)}"
    if not is_process_0():
        reply = json.loads(_client().blocking_key_value_get(key, int(PROCESS_0_SECONDS * 1000)))
        if "refused" in reply:
            raise RunError(reply["refused"])
        return reply.get("value")
    try:
        value = function()
    except NnxdslError as error:
        _client().key_value_set(key, json.dumps({"refused": str(error)}))
        raise
    _client().key_value_set(key, json.dumps({"value": value if _is_plain(value) else None}))
    return value


def process_0_first(function: Callable[[], T]) -> T:
    """Calls a function in process 0, then in all others, which read what it has stored; returns its result.

    All processes must call it in the same order.

    Raises:
        NnxdslError: As `on_process_0`.
    """
    results: list[T] = []
    on_process_0(lambda: results.append(function()))
    return results[0] if results else function()


def barrier() -> None:
    """Waits until all processes have called it."""
    if not is_single_process():
        _client().wait_at_barrier(f"nnxdsl/barrier/{next(_call_ids)}", int(PROCESS_0_SECONDS * 1000))


def all_max(value: int) -> int:
    """The largest value of all processes, which must call it in the same order and wait for each other."""
    if is_single_process():
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


class Vote:
    """The maximum over all processes, delayed by one call, so that a call at each step does not block.

    All processes must call it in the same order, and get the same result.
    """

    def __init__(self) -> None:
        """Starts with the value 0."""
        self._last: jax.Array | None = None
        if not is_single_process():
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._each = NamedSharding(mesh, PartitionSpec("all"))
            self._largest = jax.jit(lambda flags: flags.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, value: int) -> int:
        """Contributes a number, and returns the maximum of the previous call."""
        if is_single_process():
            return value
        before = 0 if self._last is None else int(self._last)
        mine = np.full((1,), value, np.int32)
        flags = jax.make_array_from_callback((jax.device_count(),), self._each, lambda _: mine)
        largest = self._last = self._largest(flags)
        largest.copy_to_host_async()
        return before


class Watch:
    """Sends heartbeats to the other processes, and ends this one when a peer fails; a context manager.

    When a process is killed, the others would wait for it in a collective, on some networks forever. So each process
    sends a counter through the coordinator once a second; if one stops for `LOST_SECONDS` or reports an error, all
    processes exit. The last checkpoint is complete, and the run resumes from it when it is started again.

    Enter it right after joining. It does not access jax's devices, since their initialization waits for all processes.
    One thread talks to the coordinator, whose answer may never come; the second one detects that.
    """

    def __init__(self, lost_seconds: float = LOST_SECONDS) -> None:
        """Starts no threads before it is entered.

        Args:
            lost_seconds: Time without a heartbeat after which a process counts as failed.
        """
        self._lost_seconds = lost_seconds
        self._over = threading.Event()
        self._unanswered = 0  # seconds that this process was running since the coordinator's last answer
        self._last_seen: dict[int, tuple[str, float]] = {}
        self._threads = [
            threading.Thread(target=target, name="processes", daemon=True) for target in (self._exchange, self._wait)
        ]

    def __enter__(self) -> Watch:
        if not _is_alone_by_coordinator():
            self._last_seen = dict.fromkeys(range(_state().num_processes), ("", time.monotonic()))
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if _is_alone_by_coordinator():
            return
        self._over.set()
        for thread in self._threads:
            thread.join(_BEAT_SECONDS)  # not longer: it may be waiting for an answer
        _within(REPORT_SECONDS, lambda: self._send(_ENDED if kind is None else f"{_FAILED}{kind.__name__}: {error}"))

    def _send(self, state: str) -> None:
        mine = json.dumps([socket.gethostname(), os.getpid(), state])
        _client().key_value_set(f"{_ALIVE}{_state().process_id}", mine, allow_overwrite=True)

    def _exchange(self) -> None:
        for count in itertools.count(1):
            try:
                self._send(str(count))
                messages = dict(_client().key_value_dir_get(_ALIVE))
            except Exception as error:  # of jaxlib's own type
                self._end(f"process 0, which coordinates the others, cannot be reached: {_line(error)}")
                return
            self._unanswered = 0
            states = {int(key.rpartition("/")[2]): json.loads(text) for key, text in messages.items()}
            for number in self._last_seen:
                if problem := self._problem(number, *states.get(number, ("", 0, ""))):
                    self._end(problem)
            if self._over.wait(_BEAT_SECONDS):
                return

    def _wait(self) -> None:
        """Counts instead of reading a clock: time during which this process was stopped does not count."""
        while not self._over.wait(_BEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * _BEAT_SECONDS > self._lost_seconds:
                self._end(f"process 0, which coordinates the others, has not answered for {self._lost_seconds:.0f} s")

    def _problem(self, number: int, host: str, pid: int, state: str) -> str | None:
        """Why a process counts as failed, or None; records its state. One without a heartbeat so far has no host."""
        who = f"process {number} (pid {pid} on {host})" if host else f"process {number}"
        if number == _state().process_id or state == _ENDED:
            return None
        if state.startswith(_FAILED):
            return f"{who} has {state}"
        now = time.monotonic()
        before, since = self._last_seen[number]
        self._last_seen[number] = state, since if before == state else now
        is_silent = before == state and now - since > self._lost_seconds
        return f"{who} has not been heard of for {self._lost_seconds:.0f} s" if is_silent else None

    def _end(self, why: str) -> None:
        """Exits this process, whose main thread may wait for the failed peer forever.

        Callbacks have a time limit, since they may block as well: on a terminal, or on a disk that does not answer.
        """
        if self._over.is_set():
            return
        end = time.monotonic() + REPORT_SECONDS
        for report in reversed(_peer_failure_callbacks):
            _within(max(0.5, end - time.monotonic()), functools.partial(report, why))
        os._exit(1)


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Calls a function in a thread and waits for it at most `seconds`; ignores its errors."""

    def call() -> None:
        with contextlib.suppress(Exception):  # the coordinator, a disk or a terminal may fail as well
            function()

    thread = threading.Thread(target=call, name="processes", daemon=True)
    thread.start()
    thread.join(seconds)


@contextlib.contextmanager
def on_peer_failure(report: Callable[[str], object]) -> Iterator[None]:
    """Within the block, `report` is called from another thread with a message if a peer fails, before the exit."""
    _peer_failure_callbacks.append(report)
    try:
        yield
    finally:
        _peer_failure_callbacks.remove(report)


def wait_for_peers(seconds: float = LINGER_SECONDS) -> None:
    """Waits in process 0, for a limited time, until all processes have reported their end.

    Process 0 runs the coordinator; when it exits, jax aborts the processes that are still connected, without a message.
    """
    # From the coordinator's client: `jax.process_index()` would initialize the devices, which waits for all processes.
    should_wait = not _is_alone_by_coordinator() and _state().process_id == 0
    end = time.monotonic() + (seconds if should_wait else 0)
    with contextlib.suppress(Exception):
        while time.monotonic() < end:
            states = [json.loads(text)[2] for _, text in _client().key_value_dir_get(_ALIVE)]
            if sum(state == _ENDED or state.startswith(_FAILED) for state in states) == _state().num_processes:
                end = min(end, time.monotonic() + 0.2)  # between the report and the exit
            time.sleep(0.05)


def shutdown() -> None:
    """Disconnects from the other processes at the end of the program."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def _client() -> Any:
    return _state().client


def _state() -> Any:
    """The state of `jax.distributed`, which needs no initialized devices."""
    return cast(Any, distributed.global_state)


def _is_alone_by_coordinator() -> bool:
    return _state().client is None or _state().num_processes == 1


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
