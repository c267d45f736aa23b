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
    _is_told: bool = attrs.field(default=False, init=False)

    def on_step_end(self, trainer: Trainer) -> None:
        """Writes the completions of this step, if one of the steps that train on them is due."""
        step, steps = trainer.step, self.rollouts.objective.num_iterations
        if step % steps == 0:
            self._tell_unscored(trainer)
        if self.log.every_steps is None or step % steps or -step % self.log.every_steps >= steps:
            return
        directory, number = self.attempt.directory, self.attempt.number
        for row in self.rollouts.groups(self.rollouts.at(step, trainer.state), self.log.prompts):
            directory.append_rollout({"step": step, "attempt": number, **row})

    def _tell_unscored(self, trainer: Trainer) -> None:
        """Says which completions have no reward: on the terminal for the first time, then in the log."""
        unscored = self.rollouts.unscored(self.rollouts.at(trainer.step, trainer.state))
        if unscored:
            tell = self.attempt.reporter.log if self._is_told else self.attempt.reporter.event
            others = f" and {len(unscored) - 1:,} others" if len(unscored) > 1 else ""
            tell(f"step {trainer.step}: no reward applies to a completion of {unscored[0]}{others}; advantages are 0")
            self._is_told = True
