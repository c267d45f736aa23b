"""Rows 20 to 22: clocks that jump, gradients that are NaN, spikes."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from fault_lab import Child, Lab, Whole, digests, rows

from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import liveness_of

pytestmark = pytest.mark.faults

JUMPING = """
import itertools, time
real, looks = time.time, itertools.count(1)
time.time = lambda: real() + {jump}
import tiny
tiny.experiment.main()
"""


def jumping(lab: Lab, jump: str, point: str) -> Child:
    """The run under a wall clock of its own.

    Args:
        lab: Where it runs.
        jump: Seconds that are added to the clock, by `next(looks)`: how often it was looked at.
        point: A failpoint.
    """
    (lab.place / "jump.py").write_text(JUMPING.replace("{jump}", jump))
    return lab.nursery.start(lab.place, "jump.py", environment={"NNXDSL_FAILPOINT": point})


def test_clocks_that_jump_change_nothing(lab: Lab, whole: Whole) -> None:
    """At first a clock that goes backwards, a day at each look; then years ahead, then years ago."""
    child = jumping(lab, "-1e5 * next(looks)", "commit-durable@2")
    assert child.wait() == -9, child.said()
    assert lab.directory.liveness() == "lost"
    assert whole.check_saved(lab.run) == 6
    child = jumping(lab, "3e8", "commit-durable@1")
    assert child.wait() == -9, child.said()
    assert whole.check_saved(lab.run) == 9
    child = jumping(lab, "-3e8", "metrics-appended@1:pause")
    child.until(child.is_stopped)
    assert lab.directory.liveness() == "running"  # its heartbeat is years ago
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.said()
    whole.check_ended(lab.run)


def test_a_clock_that_leaps_ahead_in_the_middle_of_a_save_loses_no_step(lab: Lab, whole: Whole) -> None:
    """Orbax then gives the save up, since it reckons with that clock: said, as any save that fails."""
    child = jumping(lab, "1e4 * next(looks)", "trash-swept@9")
    assert child.wait() == 1, child.said()
    error = child.said().splitlines()[-1]
    assert error.startswith("TrainingError: checkpoint step 3 could not be saved in ")
    assert "timed out" in error
    assert whole.check_saved(lab.run) == 0
    lab.finish()
    whole.check_ended(lab.run)


def test_steps_are_ordered_by_number_and_never_by_time(killed: Lab, whole: Whole) -> None:
    """The newer step is years older by its files' times; and the status and the rows are of the future."""
    for path in (killed.checkpoints / "00000009").rglob("*"):
        os.utime(path, (1.0, 1.0))
    os.utime(killed.checkpoints / "00000009", (1.0, 1.0))
    for path in killed.run.glob("*.json*"):
        os.utime(path, (4e9, 4e9))
    assert f"resuming runs/{killed.run.name} at step 9\n" in killed.finish().said()
    whole.check_ended(killed.run)


@pytest.mark.parametrize("jump", [-1e8, 1e8])
def test_a_live_run_elsewhere_is_not_lost_because_clocks_differ(killed: Lab, jump: float) -> None:
    """On another machine there is but the wall clock; a heartbeat that changes is a sign of life, whatever it says."""
    directory = killed.directory
    path = directory.path / "status.json"
    status = json.loads(path.read_text())

    def beat(number: int) -> None:
        heartbeat = {"wall": time.time() + jump + number, "monotonic": 5.0 + number, "boot": "another"}
        path.write_text(json.dumps({**status, "state": "running", "host": "elsewhere", "heartbeat": heartbeat}))

    beat(0)
    RunDirectory(directory.path).liveness()  # it is seen for the first time
    beat(10)
    assert RunDirectory(directory.path).liveness() == "running"
    assert liveness_of(RunDirectory(directory.path).status()) == "running"


POISONED = """
import tiny
from nnxdsl import Guard
from nnxdsl.data.sampler import BatchSampler
real = BatchSampler.batch_at
def poisoned(self, step, reads=None):
    batch = real(self, step, reads)
    if step in {steps} and hasattr(batch, "tokens"):
        tokens = batch.tokens.copy()
        tokens[0, 0] = 10_000  # in no vocabulary: its vector is NaN
        batch = batch._replace(tokens=tokens)
    return batch
BatchSampler.batch_at = poisoned
tiny.experiment.main()
"""


def poisoned(lab: Lab, *steps: int) -> str:
    (lab.place / "poisoned.py").write_text(POISONED.replace("{steps}", str(set(steps))))
    return "poisoned.py"


def test_a_nan_stops_with_the_step_its_rows_and_the_weights_from_before(lab: Lab, whole: Whole) -> None:
    child = lab.nursery.start(lab.place, poisoned(lab, 7))
    assert child.wait() == 1, child.said()
    error = child.said().splitlines()[-1]
    assert error.startswith("TrainingError: step 7: loss is nan, grad_norm nan; its rows begin with texts.jsonl:")
    assert "; the state before it is saved as step 7; " in error
    assert whole.check_saved(lab.run) == 7  # bit for bit those of a run that never met it
    status = lab.directory.status()
    assert (status.get("state"), status.get("exit_code")) == ("failed", 1)
    assert np.isnan(rows(lab.directory)[-1]["loss"])
    lab.finish()  # with the rows mended
    whole.check_ended(lab.run)


def test_skipped_steps_are_counted_capped_and_change_nothing(lab: Lab) -> None:
    argv = ("run", "guard=Guard.Skip(max_in_a_row=2, max_total=3)", "checkpoint.every_steps=1", "checkpoint.keep=100")
    child = lab.nursery.start(lab.place, poisoned(lab, 4, 5, 8), *argv)
    assert child.wait() == 0, child.said()
    for step, count, total in ((4, 1, 1), (5, 2, 2), (8, 1, 3)):
        assert f"step {step}: loss is nan, grad_norm nan; its rows begin with texts.jsonl:" in child.said()
        assert f"; skipped, {count} in a row, {total} in all" in child.said()
    with CheckpointReader(lab.checkpoints) as checkpoints:
        actual = {step: digests(checkpoints, step) for step in checkpoints.steps()}
    for before, after in ((4, 5), (5, 6), (8, 9)):
        kept = [
            name for name in actual[before] if name.startswith("trainable.") or ".inner" in name or "inner/" in name
        ]
        assert len(kept) > 5, sorted(actual[before])
        assert all(actual[before][name] == actual[after][name] for name in kept)
    assert actual[6] != actual[7]
    other = Lab(lab.place, lab.nursery)
    argv = ("run", "guard=Guard.Skip(max_in_a_row=1)", "name=capped")
    child = other.nursery.start(lab.place, poisoned(lab, 4, 5, 8), *argv)
    assert child.wait() == 1
    assert "2 steps were skipped by step 5, more than guard.max_in_a_row; the last checkpoint is step 3" in child.said()


SPIKED = POISONED.replace("import tiny\n", "import numpy as np\nimport tiny\n").replace(
    "tokens[0, 0] = 10_000  # in no vocabulary: its vector is NaN",
    "tokens[:] = 1 + np.arange(tokens.size).reshape(tokens.shape) % 250",
)


def test_a_spike_is_skipped_and_written_down(lab: Lab) -> None:
    (lab.place / "poisoned.py").write_text(SPIKED.replace("{steps}", "{9}"))
    guard = "guard=Guard.SkipSpikes(window=4, max_norm_ratio=100.0, max_loss_ratio=1.05)"
    child = lab.nursery.start(lab.place, "poisoned.py", "run", guard)
    assert child.wait() == 0, child.said()
    actual: list[dict[str, Any]] = [row for row in rows(lab.directory) if "kind" not in row]
    assert actual[9]["skipped"] == 1
    assert [row["step"] for row in actual if row["skipped"]] == [9]
    assert any("step 9: loss is " in event["event"] and "skipped" in event["event"] for event in lab.directory.events())
    assert actual[9]["loss"] > 1.05 * np.median([row["loss"] for row in actual[5:9]])
