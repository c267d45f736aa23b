"""Writes sampled completions with their rewards and advantages."""

from __future__ import annotations

import attrs

from nnxdsl.config.recording.rollouts import RolloutLog
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.rollouts import Rollouts
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class RolloutWriter(Hook):
    """Writes `rollouts.jsonl`: what `RolloutLog` selects, while the devices compute the step that trains on it.

    Every process knows all completions of a step, and the first one writes them.

    Attributes:
        attempt: The run.
        rollouts: Where the completions come from.
        log: Which are written.
    """

    attempt: Attempt
    rollouts: Rollouts
    log: RolloutLog

    def on_step_end(self, trainer: Trainer) -> None:
        """Writes the completions of this step, if one of the steps that train on them is due."""
        step, steps = trainer.step, self.rollouts.objective.num_iterations
        if self.log.every_steps is None or step % steps or -step % self.log.every_steps >= steps:
            return
        directory, number = self.attempt.directory, self.attempt.number
        for row in self.rollouts.groups(self.rollouts.at(step, trainer.state), self.log.prompts):
            directory.append_rollout({"step": step, "attempt": number, **row})
