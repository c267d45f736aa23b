"""The run lock: one writer per directory, and a killed writer does not keep it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl.errors import RunError
from nnxdsl.runs.lock import RunLock
from nnxdsl.storage import process_info

ROOT = Path(__file__).parents[2]

HOLD = """
import sys
from pathlib import Path
from nnxdsl.runs.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

FORK = """
import os, sys, time
from pathlib import Path
from nnxdsl.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
"""


def start(code: str, directory: Path) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_two_processes_cannot_hold_one_lock(tmp_path: Path) -> None:
    holder, said = start(HOLD, tmp_path)
    assert said == "held"
    with pytest.raises(RunError) as raised:
        RunLock(tmp_path)
    since = json.loads((tmp_path / "lock").read_text())["since"]
    assert str(raised.value) == (
        f"{tmp_path} is in use by process {holder.pid} on {process_info.hostname()} since {since}; "
        f"wait until it ends, or stop it with `kill -TERM {holder.pid}` (it saves first)"
    )
    holder.communicate("\n")
    assert (tmp_path / "lock").read_text() == ""
    with RunLock(tmp_path) as lock:
        assert lock.recovered is None


def test_a_killed_holders_lock_is_recovered(tmp_path: Path) -> None:
    holder, _ = start(HOLD, tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with RunLock(tmp_path) as lock:
        assert lock.recovered is not None
        assert lock.recovered.process.pid == holder.pid
        assert not lock.recovered.process.is_alive()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_child_that_outlives_the_holder_is_told_from_it(tmp_path: Path) -> None:
    holder, said = start(FORK, tmp_path)
    try:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with pytest.raises(RunError, match=r"which has ended but left a child that holds the lock; end the child$"):
            RunLock(tmp_path)
    finally:
        os.kill(int(said), signal.SIGKILL)
        holder.communicate()
    RunLock(tmp_path).release()


def test_a_process_is_told_that_it_holds_the_lock_itself(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunError) as raised:
        RunLock(tmp_path)
    assert re.fullmatch(
        rf".* is in use by process {os.getpid()} on .* since .*, which is this process; "
        rf"release the first lock before taking a second",
        str(raised.value),
    )


def test_a_holder_elsewhere_is_named(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        record = {"pid": 1, "pid_started": 1, "host": "elsewhere", "since": "noon"}
        (tmp_path / "lock").write_text(json.dumps(record))
        with pytest.raises(RunError) as raised:
            RunLock(tmp_path)
        assert str(raised.value) == (
            f"{tmp_path} is in use by process 1 on elsewhere since noon; wait until it ends, or stop it there"
        )
        (tmp_path / "lock").write_text("{")
        with pytest.raises(RunError) as raised:
            RunLock(tmp_path)
        assert str(raised.value) == f"{tmp_path} is in use by another process; wait until it ends"


def test_the_lock_is_no_way_to_write_elsewhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").symlink_to(victim)
    with pytest.raises(RunError) as raised:
        RunLock(run)
    message = "is a link, not a regular file; replace it by the file, or remove it"
    assert str(raised.value) == f"{run / 'lock'}: {message}"
    assert victim.read_text() == "mine"


def test_release_is_final_and_may_be_repeated(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()
