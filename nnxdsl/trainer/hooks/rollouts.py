"""Writes sampled completions with their rewards and advantages."""

from __future__ import annotations

import attrs

from nnxdsl.config.recording.rollouts import RolloutLog
from nnxdsl.rollouts.log import group_rows, unscored
from nnxdsl.rollouts.rollout import Rollout
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook
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
    _reported: set[str] = attrs.field(factory=set, init=False)

    def on_step_end(self, trainer: Trainer) -> None:
        """Writes the completions of this step, if one of the steps that train on them is due."""
        step, steps = trainer.step, self.rollouts.objective.num_iterations
        if step % steps:
            return
        rollout = self.rollouts.rollout_at(step, trainer.state)
        self._report_unscored(rollout)
        self._report_missing(rollout)
        if self.log.every_steps is None or -step % self.log.every_steps >= steps:
            return
        directory, number = self.attempt.directory, self.attempt.number
        for row in group_rows(self.rollouts, rollout, self.log.prompts):
            directory.append_rollout({"step": step, "attempt": number, **row})

    def _report_unscored(self, rollout: Rollout) -> None:
        """Says which completions have no reward."""
        if rows := unscored(self.rollouts, rollout):
            others = f" and {len(rows) - 1:,} others" if len(rows) > 1 else ""
            self._report(
                "unscored", f"no reward applies to a completion of {rows[0]}{others}; advantages are 0", rollout
            )

    def _report_missing(self, rollout: Rollout) -> None:
        """Says how many groups dynamic sampling has not found."""
        objective = self.rollouts.objective
        groups = len(rollout.rows) // objective.num_generations
        complete = int(rollout.metrics.get("sampling/num_groups", groups))
        if complete < groups:
            batches = f"{objective.max_num_gen_batches} batches of prompts (objective.max_num_gen_batches)"
            self._report("missing", f"{complete} of {groups} groups have different rewards after {batches}", rollout)

    def _report(self, kind: str, message: str, rollout: Rollout) -> None:
        """Says something of its kind on the terminal for the first time, then in the log."""
        report = self.attempt.reporter.log if kind in self._reported else self.attempt.reporter.event
        report(f"step {rollout.step}: {message}")
        self._reported.add(kind)
