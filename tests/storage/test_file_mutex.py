"""The file lock: one process at a time, and released when its holder is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from nnxdsl.storage.file_mutex import file_lock

HOLDER = """
import sys, time
from pathlib import Path
from nnxdsl.storage.file_mutex import file_lock
with file_lock(Path(sys.argv[1]), print, lambda: False) as is_ours:
    print(is_ours, flush=True)
    time.sleep(60)
"""


def test_one_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    lock = tmp_path / "work.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    waits: list[str] = []
    with file_lock(lock, lambda: waits.append("told"), lambda: bool(waits)) as is_ours:
        assert not is_ours  # asked to end while waiting
    assert waits == ["told"]
    threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    with file_lock(lock, lambda: waits.append("again"), lambda: False) as is_ours:
        assert is_ours
    assert waits == ["told", "again"]
    assert holder.wait() == -signal.SIGKILL
    with file_lock(lock, lambda: waits.append("never"), lambda: True) as is_ours:
        assert is_ours  # nobody has it, so there is nothing to wait for
    assert "never" not in waits
    holder.stdout.close()
