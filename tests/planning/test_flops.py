"""The fewest operations of a step, counted by hand: pairs of tokens off the mask, products off the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Objective
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.planning.flops import executed, model_flops, weights, work
from nnxdsl.program.batches import Lengths, kind_of
from nnxdsl.program.batches.pairs import pair_positions
from nnxdsl.program.blueprint import build_blueprint

MODEL = Small(layers=5, pattern=2, embed_dim=16, mlp_dim=32, heads=4, head_dim=8, window=5)
LOCAL, GLOBAL = 3, 2
QUERY_KEY_VALUE = 16 * 32 + 2 * 16 * 16
LAYER = QUERY_KEY_VALUE + 32 * 16 + 3 * 16 * 32
RANK = 2
ADAPTERS = 5 * RANK * ((16 + 32) + 2 * (16 + 16) + (32 + 16) + 3 * (16 + 32))
HEAD = 48 * 16


@pytest.fixture
def asked(experiment: Callable[..., Experiment]) -> Callable[..., Experiment]:
    return lambda **fields: experiment(model=MODEL, **fields)


def attention(batch: PairBatch | SequenceBatch) -> float:
    """Two products a head for each pair that the mask lets through, rows of weight 0 left out."""
    is_pair = isinstance(batch, PairBatch)
    places = pair_positions(batch) if is_pair else positions_right_padded(batch.length, batch.tokens.shape[1])
    real = (np.asarray(batch.weight) > 0)[:, None] & (np.asarray(places.segment_ids) > 0)  # [B, T]
    seen = [int(np.sum(np.asarray(attention_mask(places, places, window))[real])) for window in (MODEL.window, None)]
    return 4 * 4 * 8 * (LOCAL * seen[0] + GLOBAL * seen[1])


def pair_counts(batch: PairBatch) -> tuple[int, int]:
    rows = np.asarray(batch.weight) > 0
    targets = int(np.sum((batch.chosen_length + batch.rejected_length)[rows]))
    return targets + int(np.sum(batch.prompt_length[rows])), targets


def test_everything_trained_beside_a_reference(asked: Callable[..., Experiment], pairs: Callable[..., Any]) -> None:
    batch = pairs(6, prompt=12, response=9, fill=2)
    tokens, targets = pair_counts(batch)
    forward, a = 2 * 5 * LAYER * tokens + 2 * HEAD * targets, attention(batch)
    assert model_flops(build_blueprint(asked()), kind_of(batch).lengths(batch)) == 3 * forward + 3 * a + forward + a
    known = batch._replace(reference_chosen=np.zeros(6, np.float32), reference_rejected=np.zeros(6, np.float32))
    assert model_flops(build_blueprint(asked()), kind_of(known).lengths(known)) == 3 * forward + 3 * a


def test_adapters_need_no_gradient_below_the_first(asked: Callable[..., Experiment], pairs: Callable[..., Any]) -> None:
    batch = pairs(6, prompt=12, response=9)
    tokens, targets = pair_counts(batch)
    forward, a = 2 * 5 * LAYER * tokens + 2 * HEAD * targets, attention(batch)
    lora = build_blueprint(asked(adapter=Adapter.LoRA(rank=RANK)))
    assert weights(lora).adapter == ADAPTERS
    step = 2 * forward + 3 * a + 3 * 2 * ADAPTERS * tokens - 2 * QUERY_KEY_VALUE * tokens
    assert model_flops(lora, kind_of(batch).lengths(batch)) == step + forward + a
    # With adapters on the MLPs alone, the first layer's attention has no backward pass at all.
    mlp = weights(build_blueprint(asked(adapter=Adapter.LoRA(rank=RANK, targets=("mlp",)))))
    assert (mlp.idle, mlp.idle_layers) == (QUERY_KEY_VALUE + 32 * 16 + 2 * 16 * 32, (0,))
    above = weights(build_blueprint(asked(adapter=Adapter.LoRA(rank=RANK, targets=("blocks.1.mlp.down",)))))
    assert (above.idle, above.idle_layers) == (2 * LAYER, (0, 1))


def test_sequences_have_targets_where_the_loss_is(
    asked: Callable[..., Experiment], sequences: Callable[..., Any]
) -> None:
    batch = sequences(5, length=20, fill=1)
    real = batch.weight > 0
    tokens, targets = int(np.sum(batch.length[real])), int(np.sum(batch.loss_mask[real]))
    of = build_blueprint(asked(objective=Objective.SFT(loss_on="all")))
    forward = 2 * 5 * LAYER * tokens + 2 * HEAD * targets
    assert model_flops(of, kind_of(batch).lengths(batch)) == 3 * forward + 3 * attention(batch)


def test_executed_counts_padding_and_all_pairs_of_slots(
    asked: Callable[..., Experiment], sequences: Callable[..., Any]
) -> None:
    """`executed` itself is compared with XLA's count in `test_cost.py`."""
    of = build_blueprint(asked(objective=Objective.SFT(loss_on="all")))
    batch = sequences(5, length=20, fill=1)
    done = work(of, batch)
    assert done.executed == sum(executed(of, 5, Lengths(20, 19), runs_reference=False))
    assert done.model_flops < done.executed
    full = batch._replace(
        length=np.full(5, 20, np.int32), loss_mask=np.arange(20) > np.zeros((5, 1)), weight=np.ones(5)
    )
    recomputed, unseen = 2 * HEAD * 5 * 19, 3 * (4 * 4 * 8 * 5 * 5 * 20 * 20 - attention(full))
    assert work(of, full).model_flops == done.executed - recomputed - unseen
