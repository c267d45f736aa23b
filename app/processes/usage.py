"""Use of the machine by live runs and as a whole, sampled while the app runs."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import psutil

SECONDS, BACKGROUND_SECONDS = 5.0, 15.0  # between two samples while somebody looks at them, and else
DRIVER_SECONDS = 5.0  # timeout of the driver
LISTED_EVERY = 4
"""Samples while nobody looks for which live runs are listed once: a list of thousands takes a quarter of a second."""
MEASURED = 0.1
"""Seconds over which processors are measured; psutil would compare with an earlier call of the same thread alone."""
LENGTH = 1_440  # most samples: those of two to six hours
GIB = 2**30
_GPUS = "--query-gpu=index,name,memory.used,memory.total,utilization.gpu,uuid"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid,used_gpu_memory"


@attrs.frozen
class Process:
    """A run's process and all that it started: resident memory, GiB, shared pages in each, and processors in use.

    `gpus` has its memory on GPUs by their names, GiB; NaN where the driver does not tell.
    """

    memory: float
    processors: float
    gpus: Mapping[str, float] = attrs.Factory(dict)


@attrs.frozen
class GPU:
    """A GPU as its driver reports it; memory in GiB."""

    name: str  # its number and product name
    memory: float  # in use
    total: float
    utilization: float | None  # percentage of the time in which a kernel ran; None if the driver does not tell
    processes: Mapping[int, float] = attrs.Factory(dict)  # memory by process


@attrs.frozen
class Sample:
    """The machine at one time; memory in GiB."""

    time: float  # Unix time, seconds
    processors: float  # in use, of `count`
    count: int
    memory: float  # of the host, in use, of `total`
    total: float
    runs: Mapping[str, Process]  # of live runs by their ids
    gpus: tuple[GPU, ...] = ()


class Usage:
    """The latest samples. Processes are told apart from later ones of the same number by psutil."""

    def __init__(self, live_pids: Callable[[], Mapping[str, int]]) -> None:
        """Starts a thread that samples; `live_pids` returns the processes of live runs by their ids."""
        self._live_pids, self._lock, self._samples = live_pids, threading.Lock(), deque[Sample](maxlen=LENGTH)
        self._processes: dict[int, psutil.Process] = {}
        self._pids: Mapping[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="usage", daemon=True)
        self._thread.start()

    def samples(self) -> list[Sample]:
        """Returns all samples, oldest first, with a new one if the last is older than `SECONDS`."""
        self._take(SECONDS, is_listed=True)
        return list(self._samples)

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()
        self._thread.join(5)

    def _keep(self) -> None:
        for turn in itertools.count():
            if self._ended.wait(BACKGROUND_SECONDS):
                return
            self._take(BACKGROUND_SECONDS, is_listed=turn % LISTED_EVERY == 0)

    def _take(self, seconds: float, *, is_listed: bool) -> None:
        """Adds a sample if the last one is older than this; runs are listed again, or are those of the last time."""
        with self._lock:
            if not self._samples or time.time() - self._samples[-1].time >= seconds:
                self._pids = self._live_pids() if is_listed else self._pids
                self._samples.append(self._sample(self._pids))

    def _sample(self, pids: Mapping[str, int]) -> Sample:
        memory, count, devices = psutil.virtual_memory(), psutil.cpu_count() or 1, gpus()
        runs = {run: usage for run, pid in pids.items() if (usage := self._process(pid, devices)) is not None}
        self._processes = {pid: process for pid, process in self._processes.items() if process.is_running()}
        return Sample(
            time=time.time(),
            processors=psutil.cpu_percent(MEASURED) / 100 * count,
            count=count,
            memory=(memory.total - memory.available) / GIB,
            total=memory.total / GIB,
            runs=runs,
            gpus=devices,
        )

    def _process(self, pid: int, devices: Sequence[GPU]) -> Process | None:
        used = share = 0.0
        try:
            root = self._processes.setdefault(pid, psutil.Process(pid))
            tree = [root, *root.children(recursive=True)]
        except psutil.Error:
            return None
        for process in tree:
            with contextlib.suppress(psutil.Error):  # it may have ended
                same = self._processes.setdefault(process.pid, process)
                used += same.memory_info().rss / GIB
                share += same.cpu_percent() / 100
        numbers = {process.pid for process in tree}
        on_gpus = {
            gpu.name: sum(memory for number, memory in gpu.processes.items() if number in numbers)
            for gpu in devices
            if numbers & gpu.processes.keys()
        }
        return Process(used, share, on_gpus)


def gpus() -> tuple[GPU, ...]:
    """GPUs of this machine by `nvidia-smi`, which initializes none; empty without it, or if it fails."""
    devices = _nvidia_smi(_GPUS)
    return parsed(devices, _nvidia_smi(_PROCESSES)) if devices else ()


def _nvidia_smi(query: str) -> str:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=DRIVER_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parsed(devices: str, processes: str) -> tuple[GPU, ...]:
    """GPUs of two tables of nvidia-smi; figures that it lacks are in brackets.

    Args:
        devices: Number, name, MiB in use, MiB, percent, and the id of each GPU.
        processes: Id of the GPU, number and MiB of each process on it.

    >>> parsed("0, NVIDIA H100, 1024, 81920, 97, GPU-1", "GPU-1, 7, 512")
    (GPU(name='0: NVIDIA H100', memory=1.0, total=80.0, utilization=97.0, processes={7: 0.5}),)
    """
    on_gpus: dict[str, dict[int, float]] = {}
    for row in csv.reader(processes.splitlines(), skipinitialspace=True):
        with contextlib.suppress(ValueError):
            uuid, pid, used = row
            on_gpus.setdefault(uuid, {})[int(pid)] = math.nan if used.startswith("[") else float(used) / 1024
    parsed_gpus: list[GPU] = []
    for row in csv.reader(devices.splitlines(), skipinitialspace=True):
        with contextlib.suppress(ValueError):
            number, name, used, total, busy, uuid = row
            utilization = None if busy.startswith("[") else float(busy)
            sizes = float(used) / 1024, float(total) / 1024
            parsed_gpus.append(GPU(f"{number}: {name}", *sizes, utilization, on_gpus.get(uuid, {})))
    return tuple(parsed_gpus)


def disk(place: Path) -> tuple[float, float]:
    """Free and total GiB of the file system of a directory, or of its nearest existing parent."""
    while not place.is_dir():
        place = place.parent
    usage = shutil.disk_usage(place)
    return usage.free / GIB, usage.total / GIB
