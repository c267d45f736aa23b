"""Records the beginning and the end of an attempt in its run directory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.data.dataset import Dataset
from nnxdsl.errors import RunError
from nnxdsl.planning.plan import describe
from nnxdsl.runtime import distributed
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import Row
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.hooks.stopping import StopOnRequest
from nnxdsl.trainer.trainer import Trainer

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NNXDSL_DEVICE_GIB")
"""Environment variables that change what is compiled or how memory is allocated."""


@attrs.define
class RunLog(Hook):
    """The first hook of a loop: begins before all others and ends after them, so that "finished" is written last.

    Attributes:
        attempt: The run.
        stopping: Knows the signal that stopped the run.
        damage: Checkpoints that this attempt passed over, as messages.
        datasets: Training and held-out data by what events call them; None where there are none.
    """

    attempt: Attempt
    stopping: StopOnRequest
    damage: Sequence[str]
    datasets: dict[str, Dataset | None]

    def on_start(self, trainer: Trainer) -> None:
        """Records the attempt, and drops metrics, evaluations and samples beyond the step that it starts from."""
        lost = distributed.on_process_0(lambda: self._lost_steps(trainer))
        self._repair_rows(trainer)
        self._log_start(trainer)
        if lost:
            self.attempt.reporter.event(lost)
        directory, start, experiment = self.attempt.directory, trainer.start, trainer.program.experiment
        resumes = f"resuming {directory.path} at step {start}" if start else f"starting {directory.path}"
        self.attempt.reporter.event(resumes)
        directory.write_layout(describe(trainer.program.layout))
        directory.write_status(
            state="compiling",
            attempt=self.attempt.number,
            step=start,
            checkpoint=start or None,
            stage="compiling the first step",
        )
        self.attempt.display.stage(f"training {experiment.name}", trainer.total_steps)

    def _lost_steps(self, trainer: Trainer) -> str | None:
        """What the attempt before computed and did not save, and why; None if everything is saved."""
        start, settings = trainer.start, trainer.program.experiment.checkpoint
        rows: list[Row] = []
        with contextlib.suppress(RunError):  # what is damaged is said when rows are repaired
            rows = self.attempt.directory.last_metrics(8)
        done = max((row["step"] + (row.get("kind") != "evaluation") for row in rows), default=0)
        if done <= start:
            return None
        why = f"its last whole checkpoint is step {start}" if start else "it ended before its first checkpoint"
        cadence = ", ".join(f"checkpoint.{name}={getattr(settings, name)}" for name in ("every_steps", "every_minutes"))
        return f"the {done - start:,} steps from {start} of the attempt before are lost: {why} ({cadence})"

    def _repair_rows(self, trainer: Trainer) -> None:
        directory, evaluation = self.attempt.directory, trainer.program.experiment.evaluation
        for message in self.damage:  # not before: an attempt that is refused leaves the directory as it was
            directory.append_event({"event": message})
        prompts = () if evaluation is None else evaluation.prompts
        for problem in distributed.on_process_0(lambda: directory.repair_rows(trainer.start, prompts)):
            self.attempt.reporter.event(f"warning: {problem}")

    def _log_start(self, trainer: Trainer) -> None:
        directory, reporter = self.attempt.directory, self.attempt.reporter
        record = {
            **process_info.environment(sys.argv, Path.cwd()),
            "experiment": to_dict(trainer.program.experiment),
            "devices": [f"{device.platform}:{device.device_kind}" for device in trainer.program.mesh.devices.flat],
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        }
        self.attempt.number = directory.append_attempt({**record, "start": trainer.start})
        reporter.log(f"attempt {self.attempt.number}: {' '.join(record['argv'])}")
        for name, dataset in self.datasets.items():
            if dataset is not None:
                directory.append_event({"event": name, **dataset.report.to_dict()})
                reporter.log("\n".join(dataset.report.lines("trained on" if name == "data" else "held out")))

    def on_end(self, trainer: Trainer) -> None:
        """Records how the attempt ended."""
        directory, reporter, step = self.attempt.directory, self.attempt.reporter, trainer.step
        if trainer.is_stopping:
            signal = self.stopping.agree_on_signal()
            code = 0 if signal is None else 128 + signal
            reporter.event(f"stopped at step {step}, everything saved; run it again to resume")
            directory.write_status(state="stopped", step=step, exit_code=code, stage=None, eta_seconds=None)
        else:
            reporter.log(f"finished at step {step}")
            directory.append_event({"event": "finished", "step": step})
            directory.write_status(state="finished", step=step, exit_code=0, eta_seconds=0.0, stage=None)
