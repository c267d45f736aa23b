"""What a run is made of beside its data, and whether what was saved was made of the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.step import Leaves

CHANGED = {
    "tokenizer": "the tokenizer has changed (fingerprint)",
    "compute": "the dtype that is computed in has changed (it goes by the device, unless precision.compute is set)",
    "teacher": "the teacher has changed (digest of what objective.teacher.weights gives)",
    "frozen": "the frozen weights or the reference have changed (digest of what model.weights gives)",
}
"""What must be the same after a resume beside the data, and how a change is told."""


@attrs.define
class Provenance:
    """Digests of a run's parts by name, each compared with what was saved as soon as it is known.

    Attributes:
        run: The run's directory.
        saved: What the checkpoint says that the run goes on from; None where it begins.
        parts: What is known so far; saved with each step.
    """

    run: Path
    saved: Mapping[str, Any] | None
    parts: dict[str, str] = attrs.Factory(dict)

    def note(self, **parts: str) -> None:
        """Takes down what some parts are.

        Raises:
            RunError: the checkpoint was made of something else: says of what.
        """
        self.parts |= parts
        if self.saved is None:
            return
        then = self.saved["identity"]
        changed = [
            f"{CHANGED[name]}: the checkpoint has {_short(then.get(name))}, this run {_short(value)}"
            for name, value in parts.items()
            if then.get(name) != value
        ]
        if changed:
            raise RunError(
                f"{self.run}: cannot go on from step {self.saved['batches']['position']}: {'; '.join(changed)}; "
                f"put back what it was, or begin again with --restart"
            )


def reference_of(program: Program, first: TrainState) -> Leaves:
    """The weights of the reference beside the frozen ones, before any step: of an adapter, those of one that goes on.

    The magnitudes of a new DoRA follow from the frozen weights; their last bits go by the mesh, so they do not count.
    """
    experiment = program.experiment
    if program.blueprint.reference_has_own_weights:
        return first.reference
    if experiment.adapter is not None:
        goes_on = getattr(experiment.adapter, "start", None) is not None and experiment.reference_mode != "none"
        return first.trainable if goes_on else {}
    return first.trainable if experiment.reference_mode == "cached" else first.reference


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)
