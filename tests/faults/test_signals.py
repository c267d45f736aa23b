"""Rows 5 and 7: a first signal saves at the step boundary and ends with its code; a second one ends at once."""

from __future__ import annotations

import signal
import time

import pytest
from fault_lab import EVERY, STEPS, Lab, Whole, steps_done

from nnxdsl.runs.checkpoint_reader import CheckpointReader, LatestGood

pytestmark = pytest.mark.faults

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.mark.parametrize("number", CODES)
def test_a_signal_saves_at_the_step_boundary(lab: Lab, whole: Whole, number: signal.Signals) -> None:
    child = lab.start(point="metrics-appended@4:pause")
    child.until(child.is_stopped)
    child.send(number)
    child.send(signal.SIGCONT)
    assert child.wait() == CODES[number], child.said()
    status = lab.directory.status()
    step = status.get("step")
    assert step is not None
    assert 4 <= step < STEPS
    assert (status.get("state"), status.get("exit_code"), status.get("checkpoint")) == ("stopped", CODES[number], step)
    assert whole.check_saved(lab.run) == step
    assert f"stopped at step {step}, everything saved; run it again to resume" in child.said()
    assert (lab.run / "lock").read_text() == ""
    lab.finish()
    whole.check_ended(lab.run)


@pytest.mark.parametrize(
    "point", ["save-started", "save-written", "manifest-written", "commit-unnamed", "commit-renamed"]
)
def test_two_signals_in_the_middle_of_a_save_end_at_once(lab: Lab, whole: Whole, point: str) -> None:
    began = time.monotonic()
    child = lab.start(point=f"{point}@2:pause")  # of step 6
    child.until(child.is_stopped)
    sent = time.monotonic()
    for number in (*CODES, signal.SIGCONT):
        child.send(number)
    assert child.wait() in CODES.values(), child.said()  # of the one that came second
    assert time.monotonic() - sent < sent - began, "ending takes as long as six steps"
    assert whole.check_saved(lab.run, at_least=EVERY) in range(EVERY, 9)
    lab.finish()
    whole.check_ended(lab.run)


def test_a_second_signal_does_not_wait_for_the_save_that_the_first_asked_for(lab: Lab) -> None:
    argv = ("evaluation=None", "steps=20000", "checkpoint.every_steps=20000")
    child = lab.start(*argv, point="save-written:pause")
    child.until(lambda: any((lab.place / "runs").glob("tiny-*")) and steps_done(lab.run) >= 2)
    child.send(signal.SIGTERM)
    child.until(child.is_stopped)
    assert lab.directory.status().get("state") == "stopping"
    child.send(signal.SIGINT)
    child.send(signal.SIGCONT)
    assert child.wait() == 130, child.said()
    status = lab.directory.status()
    assert (status.get("state"), status.get("checkpoint")) == ("stopping", None)  # it says nothing that is not so
    assert lab.directory.liveness() == "lost"
    child = lab.start(*argv)  # from the beginning: nothing was saved, and nothing had been said to be
    child.until(lambda: steps_done(lab.run) >= 2 and lab.directory.attempts()[-1]["attempt"] == 2)
    child.send(signal.SIGTERM)
    assert child.wait() == 143, child.said()
    with CheckpointReader(lab.checkpoints) as checkpoints:
        step = lab.directory.status().get("checkpoint")
        assert (checkpoints.latest_good(), step) == (LatestGood(step), lab.directory.status().get("step"))
