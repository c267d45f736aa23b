"""The result of a run in Python: its metrics, samples and checkpoints, and the trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.generate import pretrained
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.runs.frame import frame
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime import xla_flags
from nnxdsl.runtime.compile_cache import compile_cache
from nnxdsl.storage.jsonl import Row
from nnxdsl.terminal import html
from nnxdsl.terminal.curve import curve
from nnxdsl.terminal.notebook import open_display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export

EXPORTED = "exported"
"""Directory in the run directory with the models of `Result.load_model`, by step."""


def run_experiment(experiment: Experiment, home: Path, *, quiet: bool = False, restart: bool = False) -> Result:
    """Runs an experiment in this process, or resumes it; see `Experiment.run`."""
    xla_flags.prepare(home, experiment.mesh.device_count)
    with open_display(quiet) as display, compile_cache(home, display.say):
        return Result(run(experiment, home, display, restart=restart).directory)


@attrs.frozen
class Result:
    """What a run has written so far.

    Attributes:
        directory: The run directory.
    """

    directory: Path = attrs.field(converter=Path)

    @property
    def _run(self) -> RunDirectory:
        return RunDirectory(self.directory)

    @property
    def state(self) -> str:
        """State of the run: "finished", "stopped", "running" and so on."""
        return self._run.liveness()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._run.status().get("step") or 0

    @property
    def metrics(self) -> list[Row]:
        """The metrics of each step: rows of metrics.jsonl."""
        return self._run.metrics()

    @property
    def evaluations(self) -> list[Row]:
        """The metrics of each evaluation."""
        return self._run.evaluations()

    @property
    def samples(self) -> list[Row]:
        """The completions of the evaluation's prompts, by step and prompt."""
        return self._run.samples()

    @property
    def rollouts(self) -> list[Row]:
        """The prompts whose sampled completions were written, with these, their rewards and advantages, by step."""
        return self._run.rollouts()

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints on disk, ascending."""
        return sorted(int(path.name) for path in self._run.checkpoints.glob("[0-9]*") if path.name.isdigit())

    def frame(self, kind: str = "metrics") -> Any:
        """The "metrics", "evaluations" or "samples" as a pandas DataFrame, a row for each.

        Raises:
            RunError: pandas is not installed, or there is no such kind.
        """
        if kind not in ("metrics", "evaluations", "samples"):
            raise RunError(f"kind: expected 'metrics', 'evaluations' or 'samples', got {kind!r}")
        return frame(getattr(self, kind), f"Result.{kind}, a list of dicts")

    def load_model(self, *, dtype: DTypeLike = jnp.float32) -> Pretrained:
        """The model of the newest checkpoint, with adapters merged and weights in full precision.

        It is exported for transformers to `<directory>/exported/<step>` first, once for each step.

        Raises:
            RunError, WeightsError: There is no checkpoint, or it cannot be exported; see `nnxdsl.weights.export`.
        """
        if not self.checkpoints:
            raise RunError(f"{self.directory}: there is no checkpoint to load yet")
        target = self.directory / EXPORTED / str(self.checkpoints[-1])
        if not target.exists():
            export(self.directory, target)
        return pretrained.load(target, dtype=dtype)

    def generate(self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], **sampling: Any) -> list[str]:
        """Completions of the newest checkpoint; see `Pretrained.generate` for the settings.

        It loads the model each time: call `load_model` once for several calls.
        """
        return self.load_model().generate(prompts, **sampling)

    def __repr__(self) -> str:
        return f"Result({str(self.directory)!r}, state={self.state!r}, step={self.step})"

    def _repr_html_(self) -> str:
        """The first and the last evaluation, or step, as a table, and the curve of the loss."""
        rows = self.evaluations or self.metrics
        ends = [rows[0], *rows[1:][-1:]] if rows else []
        names = [name for name, value in (ends[-1] if ends else {}).items() if isinstance(value, float)]
        title = f"{self.directory.name}: {self.state} at step {self.step}"
        head = ["", *(f"step {row['step']}" for row in ends)]
        line, dots = (
            [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]
            for name, rows in (("loss", self.metrics), ("eval/loss", self.evaluations))
        )
        table = html.table(head, ([name, *(row.get(name) for row in ends)] for name in names), title=title)
        return table + curve("loss", line, dots)
