"""Digests of a run's tokenizer, weights and dtypes, compared with those in the checkpoint that it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.forward import Leaves
from nnxdsl.storage.records import changes

CHANGED = {
    "tokenizer": "the tokenizer has changed (fingerprint)",
    "compute": "the compute dtype has changed (it depends on the device, unless precision.compute is set)",
    "teacher": "the teacher has changed (digest of what objective.teacher.weights gives)",
    "frozen": "the frozen weights or the reference have changed (digest of what model.weights gives)",
}
"""What must be unchanged after a resume besides the data, and the message about a change."""


@attrs.define
class Provenance:
    """Digests by name, each compared with the checkpoint as soon as it is recorded.

    Attributes:
        run: The run's directory.
        checkpoint: Metadata of the checkpoint that the run resumes; None where it begins.
        digests: Recorded so far; saved with each checkpoint.
    """

    run: Path
    checkpoint: Mapping[str, Any] | None
    digests: dict[str, str] = attrs.Factory(dict)

    def record(self, **digests: str) -> None:
        """Records some digests.

        Raises:
            RunError: The checkpoint has others: names them.
        """
        self.digests |= digests
        if self.checkpoint is None:
            return
        if changed := changes(CHANGED, self.checkpoint["identity"], digests):
            raise RunError(
                f"{self.run}: cannot resume from step {self.checkpoint['batches']['position']}: {'; '.join(changed)}; "
                f"restore it, or start again with --restart"
            )


def reference_of(program: Program, state: TrainState) -> Leaves:
    """The weights of the reference that are not among the frozen ones, given the state before any step.

    These are its own weights, or those of an adapter that continues another one. The magnitudes of a new DoRA follow
    from the frozen weights; their last bits depend on the mesh, so that they do not count.
    """
    experiment = program.experiment
    if program.blueprint.reference.has_own_weights:
        return state.reference
    if experiment.adapter is not None:
        is_continued = experiment.adapter.start is not None and experiment.reference_mode != "none"
        return state.trainable if is_continued else {}
    return state.trainable if experiment.reference_mode == "cached" else state.reference
