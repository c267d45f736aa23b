"""Rollouts: the policy generates completions of prompts, rewards score them, advantages follow.

Completions are a pure function of seed, step and weights, so that a resumed run generates them again. Where several
steps train on the same completions, a checkpoint between them stores these: the weights that generated them are gone.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.data.batch import GroupBatch, RolloutBatch
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.rewards import Rewards, Sampled, Scores
from nnxdsl.data.sampler import BatchSampler, Rows
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import stop_ids
from nnxdsl.errors import PlanError, Problem, RunError
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.losses.advantages import token_advantages
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runtime import distributed
from nnxdsl.storage.records import METRICS


class Completions(NamedTuple):
    """Completions as people read them; each attribute has one entry per completion, in the order of the batch.

    Attributes:
        rows: The row of its prompt.
        texts: Text, without the token that ends it.
        rewards: What each reward function gave, not weighted, `[B, rewards]`; NaN where it does not apply.
        is_truncated: Whether it reached the maximal length before its end.
        extra: What reward functions recorded, by column.
    """

    rows: Sequence[int]
    texts: Sequence[str]
    rewards: np.ndarray
    is_truncated: Sequence[bool]
    extra: Mapping[str, Sequence[Any]]


class Rollout(NamedTuple):
    """Completions of one policy.

    Attributes:
        step: The optimizer step, from 0, whose policy gave them.
        batch: What steps train on, in numpy.
        metrics: Rewards and lengths, under TRL's names.
        completions: Texts and rewards; None if it was read from a checkpoint, which does not store them.
    """

    step: int
    batch: RolloutBatch
    metrics: dict[str, float]
    completions: Completions | None = None


@attrs.define
class Rollouts:
    """Generates completions with the policy of a program.

    Attributes:
        program: Of an experiment whose objective is a `PolicyGradient`.
        prompts: The training prompts.
        tokenizer: Of prompts and answers.
        rewards: The reward functions.
    """

    program: Program
    prompts: Prompts
    tokenizer: TokenizerBase
    rewards: Rewards
    _order: BatchSampler = attrs.field(init=False)
    _stops: frozenset[int] = attrs.field(init=False)
    _sampler: Sampler | None = attrs.field(default=None, init=False)
    _last: Rollout | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        experiment = self.program.experiment
        self._stops = stop_ids(self.tokenizer)
        self._order = BatchSampler(
            self.prompts,
            batch_size=experiment.batch_size // self.objective.num_generations,
            seed=experiment.seed,
            order=experiment.data.order,
        )

    @classmethod
    def of(cls, program: Program, prompts: Prompts, tokenizer: TokenizerBase) -> Rollouts:
        """Those of a program whose rewards are registered.

        Raises:
            PlanError: A reward is not known or a setting of it has no effect, or `top_k` leaves nothing out.
            DataError: A row lacks what a reward reads.
        """
        objective, words = program.experiment.objective, program.blueprint.config.vocab_size
        assert isinstance(objective, PolicyGradient)
        if objective.top_k is not None and objective.top_k >= words:
            message = f"{objective.top_k:,} has no effect on a vocabulary of {words:,}; use None"
            raise PlanError([Problem("objective.top_k", message)], f"Experiment '{program.experiment.name}'")
        rewards = Rewards(objective.rewards, prompts.max_completion_length)
        rewards.check(prompts.columns, prompts.row_ids)
        return cls(program, prompts, tokenizer, rewards)

    @property
    def objective(self) -> PolicyGradient:
        """The program's objective."""
        objective = self.program.experiment.objective
        assert isinstance(objective, PolicyGradient)
        return objective

    def at(self, step: int, state: TrainState) -> Rollout:
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
                self._last = self._draw(step, state)
            except RunError as error:
                raise RunError(f"step {step}: {error}") from error
        return self._last

    def train_batch(self, batch: RolloutBatch) -> RolloutBatch | GroupBatch:
        """The batch in the form that the step is compiled for: each group in a row where the devices allow it."""
        size = self.program.blueprint.num_generations
        return batch if size == 1 else self.prompts.grouped(batch, size)

    def indices(self, step: int) -> Sequence[int]:
        """The rows of the prompts that a step trains on."""
        return self._order.indices(step // self.objective.num_iterations).tolist()

    def groups(self, rollout: Rollout, limit: int) -> list[dict[str, Any]]:
        """The first `limit` prompts with their completions in plain JSON values, without the step; see `RunRows`.

        Empty for a rollout that was read from a checkpoint: its groups were written before that.
        """
        completions = rollout.completions
        if completions is None:
            return []
        count, found = self.objective.num_generations, list[dict[str, Any]]()
        for group, first in enumerate(range(0, min(len(completions.rows), limit * count), count)):
            row = completions.rows[first]
            prompt = self.tokenizer.decode(self.prompts.row(row)["prompt"].tolist(), skip_special=False)
            members = [self._completion(rollout.batch, completions, index) for index in range(first, first + count)]
            found.append({"group": group, "row": self.prompts.row_ids[row], "prompt": prompt, "completions": members})
        return found

    def _completion(self, batch: RolloutBatch, completions: Completions, index: int) -> dict[str, Any]:
        rewards = completions.rewards[index]
        extra = {name: values[index] for name, values in completions.extra.items()}
        return {
            "text": completions.texts[index],
            "reward": _or_none(self.rewards.totals(rewards)[0]),
            "rewards": dict(zip(self.rewards.names, map(_or_none, rewards), strict=True)),
            "advantage": float(batch.advantages[index, 0]),
            "length": int(batch.loss_mask[index].sum()),
            "truncated": bool(completions.is_truncated[index]),
            **({"extra": extra} if extra else {}),
        }

    def unscored(self, rollout: Rollout) -> list[str]:
        """The prompts of completions that no reward applies to, whose advantage is 0."""
        completions = rollout.completions
        if completions is None:
            return []
        unscored = np.isnan(self.rewards.totals(completions.rewards))
        return [
            self.prompts.row_ids[row]
            for row, is_unscored in zip(completions.rows, unscored, strict=True)
            if is_unscored
        ]

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint stores after so many steps, in plain JSON values."""
        stored = {**self._order.state(position), "rewards": self.rewards.fingerprint(), "rollout": None}
        if self._last is not None and self._last.step < position < self._last.step + self.objective.num_iterations:
            stored["rollout"] = _packed(self._last)
        return stored

    def check(self, state: Mapping[str, Any]) -> int:
        """The position in a checkpoint's state from which these rollouts can resume.

        Raises:
            DataError: File, rows, seed or batch size are others.
            RunError: A reward's function is another by now.
        """
        position = self._order.check(state)
        if state.get("rewards") != self.rewards.fingerprint():
            names = ", ".join(self.rewards.names)
            raise RunError(
                f"the source of a reward ({names}) has changed since the checkpoint of step {position}; put it back, "
                f"or begin again with --restart"
            )
        if state.get("rollout") is not None:
            self._last = _unpacked(state["rollout"])
        return position

    def evaluate(
        self, state: TrainState, held_out: Prompts, order: Rows, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Mean rewards of one completion of each held-out prompt, sampled as in training and always with the same seed.

        Args:
            state: Whose policy answers.
            held_out: The prompts.
            order: [rows] the order in which they are answered.
            should_stop: Called before each batch; once it returns True, the rest is left out and the result is None.
        """
        size, seed = self.program.experiment.batch_size, _seed(self.program.experiment.seed, "held out")
        answers: list[list[int]] = []
        scores = Scores([], {}, {})
        for start in range(0, len(order), size):
            if should_stop():
                return None
            rows = order[start : start + size].tolist()
            filled = rows + rows[:1] * (size - len(rows))  # one program for all batches
            completions = self._answers(state, held_out, filled, seed)[: len(rows)]
            answers += completions
            scores = scores.joined(self._values(held_out, rows, completions, self._texts(completions)))
        metrics = self._metrics(scores, answers)
        return {name: value for name, value in metrics.items() if name != "frac_reward_zero_std"}

    def _draw(self, step: int, state: TrainState) -> Rollout:
        group = self.objective.num_generations
        rows = [row for row in self.indices(step) for _ in range(group)]
        answers = self._answers(state, self.prompts, rows, _seed(self.program.experiment.seed, f"step {step}"))
        texts = self._texts(answers)
        scores = self._values(self.prompts, rows, answers, texts)
        is_truncated = [answer[-1] not in self._stops for answer in answers]
        batch = self._scored(state, self.prompts.rollout_batch(rows, answers))
        log_ratios = None if batch.ref_logps is None else batch.old_logps.astype(float) - batch.ref_logps
        totals = self.rewards.totals(scores.values)
        advantages = token_advantages(self.objective, totals, batch.loss_mask, log_ratios).astype(np.float32)
        weight = np.where(is_truncated, 0, 1) if self.objective.mask_truncated_completions else np.ones(len(rows))
        old_logps = batch.old_logps if self.objective.num_iterations > 1 else None
        batch = batch._replace(advantages=advantages, weight=weight.astype(np.float32), old_logps=old_logps)
        completions = Completions(rows, texts, np.asarray(scores.values), is_truncated, scores.extra)
        return Rollout(step, batch, self._metrics(scores, answers), completions)

    def _scored(self, state: TrainState, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the log-probabilities that advantages or later steps read."""
        needs_reference = self.objective.use_kl_in_reward and self.objective.needs_reference
        if not needs_reference and self.objective.num_iterations == 1:
            return batch
        rows = self.train_batch(batch)
        if not needs_reference:
            return batch._replace(old_logps=np.asarray(self.program.score(state, rows).token_stats.logp))
        policy, reference = self.program.score_with_reference(state, rows)
        old_logps, ref_logps = np.asarray(policy.token_stats.logp), np.asarray(reference.stats.logp)
        return batch._replace(old_logps=old_logps, ref_logps=ref_logps)

    def _answers(self, state: TrainState, prompts: Prompts, rows: Sequence[int], seed: int) -> list[list[int]]:
        objective, blueprint = self.objective, self.program.blueprint
        template, leaves = self.program.policy(state)
        if self._sampler is None:
            config, compute, whole = blueprint.config, blueprint.compute, self.program.replicated
            self._sampler = Sampler(template, config, compute, self._stops, self.program.batch_sharding, whole)
        drawn = objective.temperature, objective.top_k, objective.top_p
        sampling = Sampling(prompts.max_completion_length, *drawn, seed, objective.num_speculative_tokens)
        ids = [prompts.row(row)["prompt"].tolist() for row in rows]
        found = self._sampler.complete(leaves, ids, sampling, prompt_length=prompts.shapes["prompt"])
        return [one.ids for one in found]

    def _texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each completion, without the token that ends it."""
        return [self.tokenizer.decode([token for token in answer if token not in self._stops]) for answer in answers]

    def _values(
        self, prompts: Prompts, rows: Sequence[int], answers: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> Scores:
        """The rewards of each completion."""
        columns, row_ids = [prompts.columns[row] for row in rows], [prompts.row_ids[row] for row in rows]
        sampled = Sampled(texts, answers, columns, row_ids)
        # A user's function may return other values in each process.
        return Scores(**distributed.on_process_0(lambda: self.rewards.score(sampled)._asdict()))

    def _metrics(self, scores: Scores, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """Metrics of completions under TRL's names, and those of reward functions."""
        values, totals = np.asarray(scores.values), self.rewards.totals(scores.values)
        ended = np.array([answer[-1] in self._stops for answer in answers])
        lengths = np.array([len(answer) for answer in answers])
        found = {
            **_mean_and_std(totals, "reward", "reward_std"),
            **self._zero_std(totals),
            "completions/clipped_ratio": float(1 - ended.mean()),
            **_lengths(lengths, "length"),
            **_lengths(lengths[ended], "terminated_length"),
        }
        for index, name in enumerate(self.rewards.names):
            found |= _mean_and_std(values[:, index], f"rewards/{name}/mean", f"rewards/{name}/std")
        if taken := scores.metrics.keys() & {*found, *METRICS}:
            raise RunError(f"log_metric: '{min(taken)}' is a metric of the run itself; give yours another name")
        return found | {name: float(np.mean(each)) for name, each in scores.metrics.items()}

    def _zero_std(self, totals: np.ndarray) -> dict[str, float]:
        """The share of groups whose completions have one reward, if they are whole groups."""
        count = self.objective.num_generations
        if len(totals) % count:
            return {}
        groups = [group[~np.isnan(group)] for group in totals.reshape(-1, count)]
        spread = [group.std() if group.size else 0.0 for group in groups]
        return {"frac_reward_zero_std": float(np.isclose(spread, 0).mean())}


def _or_none(value: float) -> float | None:
    """A number in JSON, where NaN is None."""
    return None if np.isnan(value) else float(value)


def _mean_and_std(values: np.ndarray, mean: str, std: str) -> dict[str, float]:
    """Two metrics of the values that are there; none if there are none."""
    scored = values[~np.isnan(values)]
    if not scored.size:
        return {}
    return {mean: float(scored.mean()), std: float(scored.std(ddof=1)) if scored.size > 1 else 0.0}


def _lengths(lengths: np.ndarray, name: str) -> dict[str, float]:
    """Metrics of the lengths of completions; 0 if there are none, as in TRL."""
    lengths = lengths if lengths.size else np.zeros(1)
    each = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
    return {f"completions/{which}_{name}": float(value) for which, value in each.items()}


def _seed(seed: int, what: str) -> int:
    """The seed of draws for one purpose."""
    return int.from_bytes(hashlib.sha256(f"nnxdsl rollouts 1: seed {seed}, {what}".encode()).digest()[:4], "little")


def _packed(rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain JSON values."""
    buffer = io.BytesIO()
    arrays = {name: array for name, array in rollout.batch._asdict().items() if array is not None}
    np.savez_compressed(buffer, **arrays)
    batch = base64.b64encode(buffer.getvalue()).decode()
    return {"step": rollout.step, "metrics": rollout.metrics, "batch": batch}


def _unpacked(stored: Mapping[str, Any]) -> Rollout:
    with np.load(io.BytesIO(base64.b64decode(stored["batch"])), allow_pickle=False) as file:
        batch = RolloutBatch(**{name: file[name] for name in file.files})
    return Rollout(int(stored["step"]), batch, dict(stored["metrics"]))
