"""From a batch to the log-probabilities that a loss reads: a pair's prompt is computed once, its completions after it.

A pair is laid out as one row `[prompt | chosen | rejected]`. Everything position-wise runs on that row; in attention
both completions see the prompt and themselves, and not each other. Both start at the position after the prompt's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.models.activations import Arrival, Constraint, constrained_by
from nnxdsl.models.attention import Places, right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.pipeline import Stages
from nnxdsl.models.tree import Template
from nnxdsl.program.logprobs import TokenStats, token_stats
from nnxdsl.program.losses import Pairs


@attrs.frozen
class Forward:
    """How a forward pass is computed.

    Attributes:
        dtype: Of activations and products.
        remat: What the backward pass computes again.
        logprob_tokens: Tokens whose logits exist at one time.
        constrain: Lays an activation out over the devices by its logical axes; None on one device.
        arrive: Lays a weight out, by its path, and fetches it from the host's memory if it lies there; None as above.
        length_multiple: Rows are filled to a multiple of so many tokens, so that they can be cut into as many parts.
        stages: In how many stages the stack of layers is cut.
        row_shards: Over how many devices the rows are cut.
    """

    dtype: Any
    remat: Literal["none", "full"]
    logprob_tokens: int
    constrain: Constraint | None = None
    arrive: Arrival | None = None
    length_multiple: int = 1
    stages: int = 1
    row_shards: int = 1

    def pairs(self, model: Decoder, batch: PairBatch) -> tuple[Pairs, TokenStats]:
        """Summed log-probabilities of both completions, and the statistics of each of their tokens `[B, 2R]`."""
        tokens = jnp.concatenate([batch.prompt, batch.chosen, batch.rejected], axis=1)  # [B, P + 2R]
        hidden = self._hidden(model, tokens, pair_places(batch))
        prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
        # A token is predicted from the slot before it, and the first of both completions from the prompt's last slot.
        from_prompt = hidden[:, prompt - 1 : prompt]  # [B, 1, D]
        for_chosen = hidden[:, prompt : prompt + response - 1]
        for_rejected = hidden[:, prompt + response : prompt + 2 * response - 1]
        predicting = jnp.concatenate([from_prompt, for_chosen, from_prompt, for_rejected], axis=1)  # [B, 2R, D]
        targets = jnp.concatenate([batch.chosen, batch.rejected], axis=1)
        real = jnp.arange(response)[None, :]
        mask = jnp.concatenate(
            [real < batch.chosen_length[:, None], real < batch.rejected_length[:, None]], axis=1
        )  # [B, 2R]
        stats = self._stats(predicting, model, targets, mask)
        chosen, rejected = jnp.sum(stats.logp[:, :response], axis=1), jnp.sum(stats.logp[:, response:], axis=1)
        lengths = (batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32))
        return Pairs(chosen, rejected, *lengths), stats

    def sequences(self, model: Decoder, batch: SequenceBatch) -> TokenStats:
        """Statistics of every token but the first `[B, T - 1]`; the mask keeps the loss's targets."""
        hidden = self._hidden(model, batch.tokens, right_padded(batch.length, batch.tokens.shape[1]))
        return self._stats(hidden[:, :-1], model, batch.tokens[:, 1:], batch.loss_mask[:, 1:])

    def read(self, model: Decoder, batch: PairBatch | SequenceBatch) -> tuple[Pairs | TokenStats, TokenStats]:
        """What a loss reads of a batch of either kind, and the statistics of each of its target tokens."""
        if isinstance(batch, PairBatch):
            return self.pairs(model, batch)
        stats = self.sequences(model, batch)
        return stats, stats

    def model(self, template: Template, leaves: Mapping[str, jax.Array]) -> Decoder:
        """The model of these leaves, those outside the stack of layers laid out: the others are when they are used."""
        inside = {path: leaf for path, leaf in leaves.items() if path.startswith("layers.")}
        outside = {path: leaf for path, leaf in leaves.items() if path not in inside}
        model = template.merge({**inside, **self.laid_out(outside)})
        assert isinstance(model, Decoder)
        return model

    def laid_out(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Weights, or their gradients, where the layout wants them."""
        return {path: leaf if self.arrive is None else self.arrive(path, leaf) for path, leaf in leaves.items()}

    def _hidden(self, model: Decoder, tokens: jax.Array, places: Places) -> jax.Array:
        """Final hidden states `[B, T, D]` of tokens `[B, T]`."""
        length = tokens.shape[1]
        if fill := -length % self.length_multiple:
            tokens = jnp.pad(tokens, ((0, 0), (0, fill)))
            places = Places(*(jnp.pad(part, ((0, 0), (0, fill))) for part in places))  # segment 0 is padding
        with constrained_by(self.constrain, self.arrive):
            hidden, _ = model(tokens, places, dtype=self.dtype, remat=self.remat, stages=self._stages(len(tokens)))
        return hidden[:, :length]

    def _stages(self, rows: int) -> Stages | None:
        if self.stages == 1:
            return None
        return Stages(self.stages, parts_in_stages(self.stages, rows // self.row_shards), "stage")

    def _stats(self, hidden: jax.Array, model: Decoder, targets: jax.Array, mask: jax.Array) -> TokenStats:
        with constrained_by(self.constrain):
            return token_stats(hidden, model.head(), targets, mask, self.logprob_tokens)


def parts_in_stages(stages: int, rows: int) -> int:
    """In how many parts a device's rows follow each other through the stages.

    As many as there are rows for, up to four times the stages: little time is lost then, and products are still large.
    """
    return max(parts for parts in range(1, min(rows, 4 * stages) + 1) if rows % parts == 0)


def pair_places(batch: PairBatch) -> Places:
    """Where the tokens of `[prompt | chosen | rejected]` stand: prompts end at their last slot, completions do not."""
    prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
    start = batch.prompt_length[:, None]  # [B, 1]
    in_prompt = jnp.arange(prompt)[None, :] - (prompt - start)  # [B, P], negative in the padding
    after = jnp.arange(response)[None, :]  # [1, R]
    rows = batch.prompt.shape[0]
    real = jnp.concatenate(
        [in_prompt >= 0, after < batch.chosen_length[:, None], after < batch.rejected_length[:, None]], axis=1
    )
    position = jnp.concatenate([in_prompt, start + after, start + after], axis=1)
    branch = np.repeat(np.arange(3), [prompt, response, response])  # [P + 2R]
    return Places(
        jnp.where(real, position, 0).astype(jnp.int32),
        real.astype(jnp.int32),
        jnp.broadcast_to(branch, (rows, branch.size)).astype(jnp.int32),
    )


def token_count(batch: PairBatch | SequenceBatch) -> jax.Array:
    """Real tokens of a batch, int32; the prompt of a pair counts once."""
    weight = batch.weight.astype(jnp.int32)
    if isinstance(batch, PairBatch):
        return jnp.sum((batch.prompt_length + batch.chosen_length + batch.rejected_length) * weight)
    return jnp.sum(batch.length * weight)
