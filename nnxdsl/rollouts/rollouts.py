"""Rollouts: the policy generates completions of prompts, rewards score them, advantages follow.

Completions are a pure function of seed, step and weights, so that a resumed run generates them again. Where several
steps train on the same completions, a checkpoint between them stores these: the weights that generated them are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from nnxdsl.config.objectives.online import Online
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.data.batch import GroupBatch, RolloutBatch
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.rewards import Rewards
from nnxdsl.data.sampler import BatchSampler, Rows
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.errors import PlanError, Problem, RunError
from nnxdsl.losses.advantages import token_advantages
from nnxdsl.losses.base import WeightedMean, means
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.rollouts.asynchronous import Asynchronous, Sampled, Synchronous
from nnxdsl.rollouts.dynamic_sampling import has_spread, select
from nnxdsl.rollouts.episode import Episode
from nnxdsl.rollouts.episode_sampler import EpisodeSampler
from nnxdsl.rollouts.metrics import episode_metrics, group_metrics
from nnxdsl.rollouts.recording import Recording
from nnxdsl.rollouts.reward_model import in_home
from nnxdsl.rollouts.rollout import Rollout

Logged = dict[str, list[float]]
"""What reward functions gave `log_metric`, by name."""


@attrs.define
class Rollouts:
    """Generates completions with the policy of a program.

    Attributes:
        program: Of an experiment whose objective is `Online`.
        prompts: The training prompts.
        tokenizer: Of prompts and answers.
        rewards: The reward functions.
        home: The directory of runs.
        recording: Where completions are recorded and read; None for completions that are sampled again.
    """

    program: Program
    prompts: Prompts
    tokenizer: TokenizerBase
    rewards: Rewards
    home: Path
    _order: BatchSampler = attrs.field(init=False)
    _sampling: Synchronous | Asynchronous = attrs.field(init=False)
    _episodes: EpisodeSampler = attrs.field(init=False)
    recording: Recording | None = None
    _last: Rollout | None = attrs.field(default=None, init=False)
    _has_compared: bool = attrs.field(default=False, init=False)
    """Whether log-probabilities of another engine have been compared with the trainer's."""
    _extra_batches: int = attrs.field(default=0, init=False)
    """Batches of prompts that dynamic sampling has taken beyond the first of each step."""

    def __attrs_post_init__(self) -> None:
        experiment = self.program.experiment
        self._episodes = EpisodeSampler.of(self.program, self.tokenizer, self.rewards, self.home)
        engine, stride, steps = self.objective.engine, self.objective.num_iterations, self.program.blueprint.total_steps
        if engine is not None and engine.max_staleness:
            self._sampling = Asynchronous(self._sampled, engine.max_staleness, stride, steps)
        else:
            self._sampling = Synchronous(self._sampled)
        self._order = BatchSampler(
            self.prompts,
            batch_size=experiment.batch_size // self.objective.num_generations,
            seed=experiment.seed,
            order=experiment.data.order,
        )

    @classmethod
    def of(cls, program: Program, prompts: Prompts, tokenizer: TokenizerBase, home: Path = Path("runs")) -> Rollouts:
        """Those of a program whose rewards are registered; `home` is the directory of runs, with reward models.

        Raises:
            PlanError: A reward is not known or a setting of it has no effect, or `top_k` or `teacher_top_k` leaves
                nothing out.
            DataError: A row lacks what a reward reads.
        """
        objective, vocab_size = program.experiment.objective, program.blueprint.config.vocab_size
        assert isinstance(objective, Online)
        if objective.top_k is not None and objective.top_k >= vocab_size:
            message = f"{objective.top_k:,} has no effect with vocab_size {vocab_size:,}; use None"
            raise PlanError([Problem("objective.top_k", message)], f"Experiment '{program.experiment.name}'")
        if objective.teacher_top_k is not None and objective.teacher_top_k >= vocab_size:
            message = f"{objective.teacher_top_k:,} leaves no others of vocab_size {vocab_size:,}; use a smaller one"
            raise PlanError([Problem("objective.teacher_top_k", message)], f"Experiment '{program.experiment.name}'")
        rewards = [in_home(reward, home) for reward in objective.rewards]
        rollouts = cls(program, prompts, tokenizer, Rewards(rewards, prompts.max_completion_length), home)
        rollouts.check_prompts(prompts)
        return rollouts

    def check_prompts(self, prompts: Prompts) -> None:
        """Refuses prompts whose rows lack what rewards and environments read, or whose episodes do not fit.

        Raises:
            DataError: Names the row, or the lengths.
        """
        self._episodes.check(prompts)

    @property
    def objective(self) -> Online:
        """The program's objective."""
        objective = self.program.experiment.objective
        assert isinstance(objective, Online)
        return objective

    def rollout_at(self, step: int, state: TrainState) -> Rollout:
        """The completions that a step trains on.

        Args:
            step: From 0.
            state: Before that step.

        Raises:
            RunError: They were drawn by weights that are gone, or a reward failed; names the row.
        """
        first = step - step % self.objective.num_iterations
        if self._last is None or self._last.step != first:
            if step != first:
                raise RunError(f"step {step} trains on the completions of step {first}, which were not saved")
            try:
                self._last = self._recorded(step) or self._record(self._draw(step, state))
            except RunError as error:
                raise RunError(f"step {step}: {error}") from error
        return self._last

    def close(self) -> None:
        """Ends what is sampled for later steps, and the engine."""
        self._episodes.close()
        self._sampling.close()

    def train_batch(self, batch: RolloutBatch) -> RolloutBatch | GroupBatch:
        """The batch in the form that the step is compiled for: each group in a row where the devices allow it."""
        size = self.program.blueprint.num_generations
        return batch if size == 1 else self.prompts.grouped(batch, size)

    def row_ids(self, step: int) -> list[str]:
        """The prompts that a step trains on, as messages name them."""
        last, first = self._last, step - step % self.objective.num_iterations
        rows = self._rows(step, self._extra_batches) if last is None or last.step != first else dict.fromkeys(last.rows)
        return [self.prompts.row_ids[row] for row in rows]

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint stores after so many steps, in plain JSON values."""
        last, rollout = self._last, None
        if last is not None and last.step < position < last.step + self.objective.num_iterations:
            rollout = last.stored()
        environments = self._episodes.turns.environments
        added = {"rewards": self.rewards.fingerprint(), "rollout": rollout, "extra_batches": self._extra_batches}
        if environments is not None:
            added["environment"] = environments.fingerprint()
        return {**self._order.state(position), **added}

    def check(self, state: Mapping[str, Any]) -> int:
        """The position in a checkpoint's state from which these rollouts can resume.

        Raises:
            DataError: File, rows, seed or batch size are others.
            RunError: A reward's function, or the class of the environment, is another by now.
        """
        position = self._order.check(state)
        if state.get("rewards") != self.rewards.fingerprint():
            names = ", ".join(self.rewards.names)
            raise RunError(
                f"the source of a reward ({names}) has changed since the checkpoint of step {position}; put it back, "
                f"or begin again with --restart"
            )
        environments = self._episodes.turns.environments
        if environments is not None and state.get("environment", "") not in ("", environments.fingerprint()):
            raise RunError(
                f"the source of environment '{environments.name}' has changed since the checkpoint of step {position}; "
                f"put it back, or begin again with --restart"
            )
        self._extra_batches = int(state.get("extra_batches", 0))
        if state.get("rollout") is not None:
            self._last = Rollout.restored(state["rollout"])
        return position

    def evaluate(
        self, state: TrainState, held_out: Prompts, order: Rows, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Means over one completion of each held-out prompt, sampled as in training and always with the same seed.

        They are of rewards, and of the distance from a teacher.

        Args:
            state: Whose policy answers.
            held_out: The prompts.
            order: [rows] the order in which they are answered.
            should_stop: Called before each batch; once it returns True, the rest is left out and the result is None.
        """
        size, weights = self.program.experiment.batch_size, self._episodes.engine.weights(state)
        episodes, logged, compared = list[Episode](), Logged(), list[Mapping[str, WeightedMean]]()
        for start in range(0, len(order), size):
            if should_stop():
                return None
            rows = order[start : start + size].tolist()
            sample = partial(self._episodes.sample, weights, held_out, rows, "held out", size)
            sampled = self._sampling.call(sample)
            _extend(episodes, logged, sampled)
            if self.objective.teacher is not None or self.objective.served_teachers:
                compared += self._compared(state, held_out, sampled[0])
        return {**means(compared), **episode_metrics(episodes, self.rewards, logged)}

    def _compared(
        self, state: TrainState, prompts: Prompts, episodes: Sequence[Episode]
    ) -> Iterator[Mapping[str, WeightedMean]]:
        """The distance from a teacher, in batches as those of other evaluations."""
        size = self.program.blueprint.forward_batch_size
        for start in range(0, len(episodes), size):
            batch = self._batch(prompts, episodes[start : start + size], size)
            yield jax.device_get(self.program.evaluate(state, batch))

    def _recorded(self, step: int) -> Rollout | None:
        """The completions of a step that were recorded before the run was interrupted.

        Raises:
            DataError, RunError: See `check`.
        """
        content = None if self.recording is None else self.recording.read(step)
        if content is None:
            return None
        self.check(content)
        return self._last

    def _record(self, rollout: Rollout) -> Rollout:
        """Records completions before anything is learned from them; returns them."""
        if self.recording is not None:
            self.recording.write(
                rollout.step, {**self.state(rollout.step), "rollout": rollout.stored(has_episodes=True)}
            )
        return rollout

    def _require_same_model(self, state: TrainState, batch: RolloutBatch) -> None:
        """Refuses an engine that does not sample with the policy's weights, by its first completions."""
        bound = self._episodes.engine.max_logp_difference
        if bound is None or self._has_compared:
            return
        logps = np.asarray(self.program.score(state, self.train_batch(batch)).token_stats.logp)
        differences = np.abs(logps.reshape(batch.loss_mask.shape) - batch.sampler_logps)[batch.loss_mask]
        if differences.mean() > bound:
            raise RunError(
                f"objective.engine: log-probabilities of its completions are {differences.mean():.3g} nats from the "
                f"trainer's in the mean, more than max_logp_difference={bound:g}: it has other weights or another "
                f"architecture, or its log-probabilities are at another temperature, or of the tokens alone that top_k "
                f"and top_p leave"
            )
        self._has_compared = True

    def _rows(self, step: int, extra_batches: int) -> list[int]:
        """The prompts of a batch that a step samples, after so many beyond the first of each step."""
        return self._order.indices(step // self.objective.num_iterations + extra_batches).tolist()

    def _draw(self, step: int, state: TrainState) -> Rollout:
        objective, size = self.objective, self.objective.num_generations
        weights = self._episodes.engine.weights(state)
        episodes, metrics, self._extra_batches = self._sampling.take(step, weights, self._extra_batches)
        counts = np.ones(len(episodes), bool)
        if objective.max_num_gen_batches > 1:
            chosen = select(self._totals(episodes), size, self._groups)
            episodes, counts = [episodes[index] for index in chosen.indices], chosen.counts
            metrics["sampling/num_groups"] = float(counts.sum() / size)
        weight = counts
        if objective.mask_truncated_completions:
            weight = weight & ~np.array([one.is_truncated for one in episodes])
        sampled = self._batch(self.prompts, episodes)
        self._require_same_model(state, sampled)
        batch = self._scored(state, sampled, weight)
        advantages = batch.advantages
        if isinstance(objective, PolicyGradient):
            log_ratios = None if batch.ref_logps is None else batch.old_logps.astype(float) - batch.ref_logps
            totals = np.where(counts, self._totals(episodes), np.nan)
            advantages = token_advantages(objective, totals, batch.loss_mask, log_ratios).astype(np.float32)
        old_logps = batch.old_logps if objective.num_iterations > 1 else None
        batch = batch._replace(advantages=advantages, weight=weight.astype(np.float32), old_logps=old_logps)
        return Rollout(step, [one.row for one in episodes], batch, metrics, episodes)

    def _sampled(self, step: int, weights: Any, extra_batches: int) -> Sampled:
        """Completions of one batch of prompts, or of as many as dynamic sampling takes; and metrics of all of them."""
        objective, size = self.objective, self.objective.num_generations
        episodes, logged, number = list[Episode](), Logged(), 0
        for number in range(objective.max_num_gen_batches):
            rows = [row for row in self._rows(step, extra_batches + number) for _ in range(size)]
            purpose = f"step {step}, batch {number}" if number else f"step {step}"
            _extend(episodes, logged, self._episodes.sample(weights, self.prompts, rows, purpose, len(rows)))
            if has_spread(self._totals(episodes), size).sum() >= self._groups:
                break
        metrics = episode_metrics(episodes, self.rewards, logged)
        if isinstance(objective, PolicyGradient):
            metrics |= group_metrics(episodes, self.rewards, size)
        if objective.max_num_gen_batches > 1:
            metrics["sampling/num_gen_batches"] = float(number + 1)
        return Sampled(episodes, metrics, extra_batches + number)

    @property
    def _groups(self) -> int:
        """Prompts of a batch."""
        return self.program.experiment.batch_size // self.objective.num_generations

    def _totals(self, episodes: Sequence[Episode]) -> np.ndarray:
        """The reward of each completion; NaN where it has none."""
        return self.rewards.totals([one.rewards for one in episodes])

    def _batch(self, prompts: Prompts, episodes: Sequence[Episode], size: int | None = None) -> RolloutBatch:
        """The batch of episodes, of `size` rows."""
        ids, is_sampled = [one.ids for one in episodes], [one.is_sampled for one in episodes]
        rows, logps = [one.row for one in episodes], [one.logps for one in episodes]
        teacher_logps = [one.teacher_logps for one in episodes if one.teacher_logps is not None]
        names = list(self.objective.served_teachers)
        teachers = [names.index(one.teacher_id) for one in episodes if one.teacher_id is not None]
        top_k = [one.teacher_top_k for one in episodes if one.teacher_top_k is not None]
        from_teachers = teacher_logps or None, teachers or None, top_k or None
        experts = [one.routed_experts for one in episodes if one.routed_experts is not None]
        return prompts.rollout_batch(rows, ids, is_sampled, size, logps, *from_teachers, experts or None)

    def _scored(self, state: TrainState, batch: RolloutBatch, counts: npt.NDArray[np.bool_]) -> RolloutBatch:
        """The batch with the log-probabilities that advantages or later steps read, and its tokens of high entropy.

        Args:
            state: Whose policy sampled.
            batch: Its completions.
            counts: [B] which of them the loss has.
        """
        objective, rows = self.objective, self.train_batch(batch)
        if not objective.has_kl_in_reward and objective.num_iterations == 1 and objective.top_entropy_quantile == 1:
            return batch
        if objective.has_kl_in_reward:
            policy, reference = self.program.score_with_reference(state, rows)
            batch = batch._replace(ref_logps=np.asarray(reference.stats.logp))
        else:
            policy = self.program.score(state, rows)
        stats = policy.token_stats
        assert stats is not None
        if objective.top_entropy_quantile < 1:
            counted = batch.loss_mask & counts[:, None]
            entropy = np.asarray(stats.entropy).reshape(counted.shape)
            batch = batch._replace(entropy_mask=high_entropy(entropy, counted, objective.top_entropy_quantile))
        return batch._replace(old_logps=np.asarray(stats.logp))


def high_entropy(entropy: npt.NDArray[np.floating], mask: npt.NDArray[np.bool_], share: float) -> npt.NDArray[np.bool_]:
    """Which tokens are among the given share of those of highest entropy.

    Args:
        entropy: [B, R], in nats.
        mask: [B, R] which tokens count.
        share: Above 0, at most 1.
    """
    if not mask.any():
        return mask
    return mask & (entropy >= np.quantile(entropy[mask], 1 - share))


def _extend(
    episodes: list[Episode], logged: Logged, added: tuple[Sequence[Episode], Mapping[str, Sequence[float]]]
) -> None:
    """Adds further completions, and what reward functions logged of them."""
    more, metrics = added
    episodes += more
    for name, values in metrics.items():
        logged.setdefault(name, []).extend(values)
