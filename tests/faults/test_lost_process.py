"""Row 27: one of two processes is killed at any moment, on a busy machine; the other ends within the promise."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_lab import Lab, environment, steps_done

from nnxdsl.runtime.distributed import LOST_SECONDS, REPORT_SECONDS
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2 * HANG_SECONDS)]

PROMISE = LOST_SECONDS + 2 * REPORT_SECONDS
"""Seconds by the clocks of the processes; a test adds what its own start took, on a machine that is as busy."""

ARGV = ("run", "mesh.data=2", "steps=100000", "evaluation=None", "checkpoint.every_steps=20")


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep the machine busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def two(lab: Lab, point: dict[int, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A run in two processes; `point` says at which point of the code one of them is killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children: list[subprocess.Popen[bytes]] = []
    for number in range(2):
        variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        if number in point:
            variables["NNXDSL_FAILPOINT"] = point[number]
        flags = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process", str(number)]
        with (lab.place / f"{number}.out").open("wb") as out:
            children.append(
                subprocess.Popen(
                    [sys.executable, "tiny.py", *ARGV, *flags],
                    cwd=lab.place,
                    env={**environment(), **variables},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def check_other_ends(lab: Lab, other: int, child: subprocess.Popen[bytes], started: float) -> float:
    """How long it took; `started` is what the processes took to begin."""
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(PROMISE + started)
    took = time.monotonic() - began
    said = (lab.place / f"{other}.out").read_text(errors="replace")
    assert child.returncode is not None, f"still there after {took:.0f} s: {said[-3000:]}"
    assert child.returncode != 0, said[-3000:]
    print(f"ended {took:.1f} s later, load {os.getloadavg()[0]:.0f}")
    return took


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_before_it_has_looked_for_devices(lab: Lab, killed: int) -> None:
    """The other one waits inside of jax for the devices of all; nothing has been heard of the first."""
    began = time.monotonic()
    with load(2), two(lab, {killed: "processes-joined"}) as children:
        wait_until(lambda: children[killed].poll() is not None)
        check_other_ends(lab, 1 - killed, children[1 - killed], time.monotonic() - began)


def killed_under_load(lab: Lab, number: int) -> None:
    seeded = random.Random(number)
    killed, steps, began = number % 2, seeded.randrange(40), time.monotonic()
    with load(4), two(lab, {}) as children:

        def is_time() -> bool:
            runs = list((lab.place / "runs").glob("tiny-*"))
            return bool(runs) and steps_done(Path(runs[0])) > steps

        wait_until(is_time)
        started = time.monotonic() - began
        time.sleep(seeded.uniform(0, 0.5))
        children[killed].kill()
        check_other_ends(lab, 1 - killed, children[1 - killed], started)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_killed_at_any_step(lab: Lab, number: int) -> None:
    killed_under_load(lab, number)
