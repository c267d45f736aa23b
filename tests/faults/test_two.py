"""Row 19: of two runs in one directory one is refused, and a lock whose holder died is none."""

from __future__ import annotations

import json
import signal

import pytest
from fault_lab import Lab, Whole

pytestmark = pytest.mark.faults


def test_of_two_that_start_together_one_is_refused(lab: Lab, whole: Whole) -> None:
    first = lab.start(point="metrics-appended@2:pause")
    first.until(first.is_stopped)
    before = {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()}
    for argv in ((), ("--restart",)):
        said = lab.refused(*argv)
        assert f"RunError: runs/{lab.run.name} is in use by process {first.pid} on " in said
        assert f"; wait until it ends, or stop it with `kill -TERM {first.pid}` (it saves first)" in said
    assert {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()} == before
    first.send(signal.SIGCONT)
    assert first.wait() == 0, first.said()
    whole.check_ended(lab.run)


def test_of_many_that_make_one_directory_one_runs(lab: Lab, whole: Whole) -> None:
    children = [lab.start() for _ in range(4)]
    ended = [(child.wait(), child.said()) for child in children]
    assert [code for code, _ in ended].count(0) >= 1, ended
    for code, said in ended:
        assert code in (0, 2), said
        assert code == 0 or "is in use by process " in said, said
    whole.check_ended(lab.run)
    assert len(lab.directory.attempts()) == 1


def test_a_killed_runs_lock_is_recovered_and_said(lab: Lab, whole: Whole) -> None:
    child = lab.start(point="metrics-appended@2")
    assert child.wait() == -9
    record = json.loads((lab.run / "lock").read_text())
    assert record["pid"] == child.pid
    lab.finish()
    events = lab.directory.events()
    assert {"event": "stale lock recovered", "of": child.pid} in [
        {name: row[name] for name in ("event", "of") if name in row} for row in events
    ]
    assert (lab.run / "lock").read_text() == ""
    whole.check_ended(lab.run)


def test_a_pid_that_is_used_again_is_no_holder(killed: Lab, whole: Whole) -> None:
    """The record names a process that lives, and is another: the kernel's lock decides."""
    (killed.run / "lock").write_text(json.dumps({"pid": 1, "pid_started": 0, "host": "here", "since": "then"}))
    killed.finish()
    whole.check_ended(killed.run)
