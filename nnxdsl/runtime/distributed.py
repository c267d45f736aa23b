"""The processes that run one experiment together: how they find each other, agree, and notice that one is gone.

They are those of `jax.distributed`: each has some of the devices, and all do the same in the same order. With one
process everything here does nothing and costs nothing.
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
from jax._src import distributed  # the coordinator's keys and barriers have no public form; orbax uses them so, too
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runtime.xla_flags import platform
from nnxdsl.storage.failpoints import reached

T = TypeVar("T")

JOIN_SECONDS = 300
"""How long a process waits for the others to come."""

LINGER_SECONDS = 5.0
"""How long the first process waits for the others to leave before it."""

LOST_SECONDS = 30.0
"""A process that has not been heard of for so long has ended, or its machine has."""

REPORT_SECONDS = 5.0
"""Longest time that reporting a lost process may delay the end."""

FIRST_SECONDS = 24 * 3600.0
"""The longest that the first process may take over what the others wait for; a dead one is noticed long before."""

_BEAT_SECONDS = 1.0
_ALIVE, _ENDED, _FAILED = "nnxdsl/alive/", "ended", "failed: "
_call_ids = itertools.count()
_peer_failure_callbacks: list[Callable[[str], object]] = []


class ProcessError(RunError):
    """The processes of a run cannot find each other, or one of them is gone."""


@attrs.frozen
class DistributedArgs:
    """Flags of a run in several processes; all None: read from the environment.

    Attributes:
        coordinator: `host:port` of process 0, reachable from all.
        processes: How many there are.
        process: Which one this is, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def distributed_args(args: DistributedArgs, environment: Mapping[str, str] = os.environ) -> DistributedArgs | None:
    """Arguments of `jax.distributed`; None for a run in one process.

    Args:
        args: Flags, which come first; then `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`;
            then what Slurm, Open MPI, Kubernetes and Cloud TPUs set, which `jax.distributed` reads itself.
        environment: Of this process.

    Raises:
        ProcessError: some of them are given and not all, or they make no sense.
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
    """Whether an engine that `jax.distributed` knows has started more than one process."""

    def number(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else 0

    slurm = "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment and number("SLURM_NTASKS") > 1
    kubernetes = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    tpu = platform(environment) == "tpu" and (len(hosts) > 1 or number("MEGASCALE_NUM_SLICES") > 1)
    return slurm or number("OMPI_COMM_WORLD_SIZE") > 1 or kubernetes or tpu


def join(args: DistributedArgs) -> bool:
    """Joins the other processes of a run, before jax looks for devices; whether there are any.

    Raises:
        ProcessError: They cannot be found: names what was tried.
    """
    found_args = distributed_args(args)
    if found_args is None or jax.distributed.is_initialized():
        return jax.distributed.is_initialized()
    # Signals are ours: a first one asks for a save at a boundary that all agree on (see `Vote`).
    jax.config.update("jax_enable_preemption_service", False)
    # Whoever leaves in good order waits for nobody long: what matters is saved by then.
    settings: dict[str, Any] = {"initialization_timeout": JOIN_SECONDS, "shutdown_timeout_seconds": 60}
    if found_args != DistributedArgs():
        settings |= {"coordinator_address": found_args.coordinator, "num_processes": found_args.processes}
        settings |= {"process_id": found_args.process, "cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        who = (
            "as the environment says"
            if found_args == DistributedArgs()
            else f"process {found_args.process} at {found_args.coordinator}"
        )
        raise ProcessError(
            f"the processes of this run could not find each other within {JOIN_SECONDS} s ({who}): {_line(error)}; "
            "start all of them, with the same --coordinator, reachable from each, and a --process of its own"
        ) from error
    reached("processes-joined")
    return True


def is_first() -> bool:
    """Whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def is_single_process() -> bool:
    """Whether the run has but this process."""
    return jax.process_count() == 1


def on_process_0(act: Callable[[], T]) -> T:
    """Calls a function in process 0 and returns its result, or raises its error, in all processes, which wait for it.

    All processes must call it at the same place.

    Args:
        act: Called in process 0 alone; its result must be JSON where the others read it.

    Raises:
        NnxdslError: `act` raised it; in the other processes a RunError with the same message.
    """
    if is_single_process():
        return act()
    key = f"nnxdsl/on_process_0/{next(_call_ids)}"
    if not is_first():
        reply = json.loads(_client().blocking_key_value_get(key, int(FIRST_SECONDS * 1000)))
        if "refused" in reply:
            raise RunError(reply["refused"])
        return reply.get("value")
    try:
        value = act()
    except NnxdslError as error:
        _client().key_value_set(key, json.dumps({"refused": str(error)}))
        raise
    _client().key_value_set(key, json.dumps({"value": value if _is_plain(value) else None}))
    return value


def barrier() -> None:
    """Waits until all processes are here."""
    if not is_single_process():
        _client().wait_at_barrier(f"nnxdsl/barrier/{next(_call_ids)}", int(FIRST_SECONDS * 1000))


def all_max(value: int) -> int:
    """The largest value of all processes, which must call it at the same place and wait for each other."""
    if is_single_process():
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


class Vote:
    """The largest number that any process gave one call ago, so that a call at each step waits for nobody.

    All processes call it at the same places, so that all get the same.
    """

    def __init__(self) -> None:
        """Has no value yet."""
        self._last: jax.Array | None = None
        if not is_single_process():
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._each = NamedSharding(mesh, PartitionSpec("all"))
            self._largest = jax.jit(lambda flags: flags.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, value: int) -> int:
        """Sends a number, and returns the largest one of the calls before."""
        if is_single_process():
            return value
        before = 0 if self._last is None else int(self._last)
        mine = np.full((1,), value, np.int32)
        flags = jax.make_array_from_callback((jax.device_count(),), self._each, lambda _: mine)
        largest = self._last = self._largest(flags)
        largest.copy_to_host_async()
        return before


class Watch:
    """Tells the other processes that this one lives, and ends it when one of them is gone; a context manager.

    A killed process cannot say so, and the others would wait for it in a transfer, over some networks for ever. So each
    counts aloud once a second, through the coordinator; whoever stops for `LOST_SECONDS`, or says that it failed, ends
    the run everywhere. What was saved last is whole, and the run goes on from it when it is started again.

    It is entered as soon as the processes have found each other, and asks jax for no devices: looking for them already
    waits for all processes. Of its two threads one talks to the coordinator, whose answer may never come; the other one
    notices that.
    """

    def __init__(self, lost_seconds: float = LOST_SECONDS) -> None:
        """Watches nothing yet.

        Args:
            lost_seconds: Silence after which a process counts as gone.
        """
        self._lost_seconds = lost_seconds
        self._over = threading.Event()
        self._unanswered = 0  # seconds that this process was at work since the coordinator's last answer
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
            thread.join(_BEAT_SECONDS)  # one that waits for an answer must not be waited for
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
        """Counts rather than looks at a clock: a process that was stopped for a while has not waited for an answer."""
        while not self._over.wait(_BEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * _BEAT_SECONDS > self._lost_seconds:
                self._end(f"process 0, which coordinates the others, has not answered for {self._lost_seconds:.0f} s")

    def _problem(self, number: int, host: str, pid: int, state: str) -> str | None:
        """Why a process counts as gone, if it does; notes what it said. One that never said anything has no host."""
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
        """Ends this process, whose main thread may be waiting for the other one for ever.

        Who is told may be as stuck as that: a terminal that takes no more, a disk that does not answer.
        """
        if self._over.is_set():
            return
        end = time.monotonic() + REPORT_SECONDS
        for report in reversed(_peer_failure_callbacks):
            _within(max(0.5, end - time.monotonic()), functools.partial(report, why))
        os._exit(1)


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Does something in a thread of its own and waits for it, but not for longer; that it fails does not matter."""

    def acted() -> None:
        with contextlib.suppress(Exception):  # the coordinator, a disk or a terminal may be gone itself
            act()

    thread = threading.Thread(target=acted, name="processes", daemon=True)
    thread.start()
    thread.join(seconds)


@contextlib.contextmanager
def on_peer_failure(report: Callable[[str], object]) -> Iterator[None]:
    """Within the block, `report` is called with who is gone and why, from another thread, before this process ends."""
    _peer_failure_callbacks.append(report)
    try:
        yield
    finally:
        _peer_failure_callbacks.remove(report)


def last_to_leave(seconds: float = LINGER_SECONDS) -> None:
    """Waits, in the first process, till all have said that they end, but not for long.

    With it goes what they talk through, and jax aborts whoever still listens, without a word, with a code of its own.
    """
    # Asked of the coordinator's client: to ask jax would wait for all processes where none has looked for its devices.
    is_waited_for = not _is_alone_by_coordinator() and _state().process_id == 0
    end = time.monotonic() + (seconds if is_waited_for else 0)
    with contextlib.suppress(Exception):
        while time.monotonic() < end:
            states = [json.loads(text)[2] for _, text in _client().key_value_dir_get(_ALIVE)]
            if sum(state == _ENDED or state.startswith(_FAILED) for state in states) == _state().num_processes:
                end = min(end, time.monotonic() + 0.2)  # between saying so and being gone
            time.sleep(0.05)


def leave() -> None:
    """Leaves the other processes in good order, at the end of the program."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def _client() -> Any:
    return _state().client


def _state() -> Any:
    """What `jax.distributed` knows without looking for devices."""
    return cast(Any, distributed.global_state)


def _is_alone_by_coordinator() -> bool:
    return _state().client is None or _state().num_processes == 1


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
