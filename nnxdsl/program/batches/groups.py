"""Groups of completions, a group a row: `[prompt | completion 1 | ... | completion G]`.

In attention each completion sees the prompt and itself, and no other completion. All start at the position after the
prompt's end, so that the prompt is computed once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.data import Data
from nnxdsl.data.batch import PER_COMPLETION, GroupBatch
from nnxdsl.data.packing import Size
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.program.batches.base import (
    AbstractArrays,
    BatchKind,
    BatchLengths,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    register,
)
from nnxdsl.program.batches.rollouts import abstract_per_token, reference_outputs, rollout_outputs


class GroupKind(BatchKind[GroupBatch]):
    """A prompt and all its completions a row; loss inputs have a row for each completion."""

    def rows(self, batch: GroupBatch) -> Rows:
        """Rows `[P, L + G R]`."""
        groups, count, response = batch.completion_ids.shape
        prompt = batch.prompt.shape[1]
        tokens = jnp.concatenate([batch.prompt, batch.completion_ids.reshape(groups, -1)], axis=1)
        layout = RowLayout((prompt, *[response] * count), prompt + count * response)
        return Rows(tokens, _positions(batch), layout, batch.routed_experts)

    def targets(self, hidden: jax.Array, batch: GroupBatch) -> Targets:
        """The tokens of all completions, `[P, G R]`; the first of each is predicted from the prompt's last."""
        groups, count, response = batch.completion_ids.shape
        prompt, width = batch.prompt.shape[1], hidden.shape[-1]
        last = hidden[:, prompt - 1 : prompt]  # [P, 1, D]
        completions = hidden[:, prompt : prompt + count * response].reshape(groups, count, response, width)
        first = jnp.broadcast_to(last[:, None], (groups, count, 1, width))
        predicting = jnp.concatenate([first, completions[:, :, :-1]], axis=2)
        ids, mask = (x.reshape(groups, -1) for x in (batch.completion_ids, batch.loss_mask))
        return Targets(predicting.reshape(groups, -1, width), ids, mask)

    def target_mask(self, batch: GroupBatch) -> jax.Array:
        """Which targets count, `[P, G R]`."""
        return jnp.asarray(batch.loss_mask).reshape(len(batch.loss_mask), -1)

    def loss_inputs(self, stats: TokenStats, batch: GroupBatch, options: PairOptions) -> tuple[LossInputs, TokenStats]:
        """The statistics of the completions' tokens `[P G, R]`, with their advantages."""
        response = batch.completion_ids.shape[2]
        by_completion = TokenStats(*(x.reshape(-1, response) for x in stats))
        return rollout_outputs(by_completion, _by_completion(batch))

    def reference_logps(self, batch: GroupBatch) -> RolloutOutputs | None:
        """The reference's log-probabilities in the batch, without other statistics; None without."""
        return reference_outputs(_by_completion(batch))

    def for_teacher(self, batch: GroupBatch) -> GroupBatch:
        """The batch with the teacher's prompts, if it has them; see `BatchKind.for_teacher`."""
        if batch.teacher_prompt is None:
            return batch
        return batch._replace(prompt=batch.teacher_prompt, prompt_length=batch.teacher_prompt_length)

    def without_cached(self, batch: GroupBatch) -> GroupBatch:
        """The batch without log-probabilities of sampling, sampler and reference, what follows, and teacher prompts."""
        batch = batch._replace(teacher_prompt=None, teacher_prompt_length=None)
        return batch._replace(old_logps=None, ref_logps=None, sampler_logps=None, entropy_mask=None)

    def lengths(self, batch: GroupBatch) -> BatchLengths:
        """What a batch in numpy holds."""
        is_real = (np.asarray(batch.weight) > 0).any(axis=1)
        completions = np.asarray(batch.completion_length)[is_real].astype(np.int64)
        prompts = np.asarray(batch.prompt_length)[is_real].astype(np.int64)
        targets = int(np.sum(np.asarray(batch.loss_mask)[is_real]))
        return BatchLengths(prompts, tuple(completions.T), targets, batch.ref_logps is not None)

    def padded(self, batch: GroupBatch) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding among them."""
        groups, count, response = batch.completion_ids.shape
        return groups, Lengths(batch.prompt.shape[1] + count * response, count * response)

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> GroupBatch:
        """The largest batch of such data, without values."""
        prompt, response = data.max_lengths()
        group, has_teacher_prompts = arrays.num_generations, arrays.has_teacher_prompts(data)
        return GroupBatch(
            prompt=arrays.array(prompt),
            prompt_length=arrays.array(),
            teacher_prompt=arrays.array(prompt) if has_teacher_prompts else None,
            teacher_prompt_length=arrays.array() if has_teacher_prompts else None,
            completion_ids=arrays.array(group, response),
            completion_length=arrays.array(group),
            **abstract_per_token(arrays, group, response),
            routed_experts=arrays.experts(prompt + group * response),
        )


def _by_completion(batch: GroupBatch) -> GroupBatch:
    """The arrays that a loss reads, with a row for each completion."""

    def flat(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.asarray(x).reshape(-1, *x.shape[2:])

    read = (name for name in PER_COMPLETION if name not in ("completion_ids", "completion_length"))
    return batch._replace(**{name: flat(getattr(batch, name)) for name in read})


def _positions(batch: GroupBatch) -> TokenPositions:
    """Positions of the tokens of rows; prompts are left-padded, completions right-padded."""
    groups, count, response = batch.completion_ids.shape
    prompt, start = batch.prompt.shape[1], batch.prompt_length[:, None]  # [P, 1]
    in_prompt = jnp.arange(prompt)[None, :] - (prompt - start)  # [P, L], negative in the padding
    after = start + jnp.tile(jnp.arange(response), count)[None, :]  # [P, G R]
    in_completion = jnp.arange(response) < batch.completion_length[:, :, None]  # [P, G, R]
    real = jnp.concatenate([in_prompt >= 0, in_completion.reshape(groups, -1)], axis=1)
    position = jnp.concatenate([in_prompt, after], axis=1)
    branch = np.repeat(np.arange(count + 1), [prompt, *[response] * count])
    return TokenPositions(
        jnp.where(real, position, 0).astype(jnp.int32),
        real.astype(jnp.int32),
        jnp.broadcast_to(branch, (groups, branch.size)).astype(jnp.int32),
    )


register(GroupBatch, GroupKind())
