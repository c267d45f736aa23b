"""QK-clip: steps equal a replay in torch for MHA, GQA and MLA; only a head's own weights are scaled; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import (
    Adapter,
    Experiment,
    Guard,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    Quantization,
    Schedule,
    Weights,
    compile,
)
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.errors import PlanError, SpecError
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.max_logits import max_logits, recording_max_logits
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.mixer import HeadColumns
from nnxdsl.optim.qk_clip import QKClip
from nnxdsl.program.batches.pairs import pair_positions
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.checkpoint_views import checkpoint_arrays, checkpoint_targets, with_restored

REFERENCE = Path(__file__).parents[1] / "reference"
REPLAYS: dict[str, Any] = json.loads((REFERENCE / "qk_clip" / "expected.json").read_text())
RATE = Schedule.Constant(lr=0.02)
SFT = Objective.SFT(loss_on="all")
LENGTH = 32


def muon(tau: float | None, **fields: Any) -> Optimizer:
    return Optimizer.Muon(schedule=RATE, weight_decay=0.1, eps=1e-4, max_attention_logit=tau, **fields)


def batch_of(stored: dict[str, Any], length: int = 12) -> SequenceBatch:
    def padded(rows: list[list[Any]]) -> np.ndarray:
        return np.array([row + [0] * (length - len(row)) for row in rows])

    lengths = np.array([len(row) for row in stored["tokens"]], np.int32)
    weight = np.ones(len(lengths), np.float32)
    return SequenceBatch(
        padded(stored["tokens"]).astype(np.int32), lengths, padded(stored["loss_mask"]).astype(bool), weight
    )


FROZEN = {"mha": (), "gqa": ()}
MLA_FROZEN = ("mlp", "embed", "lm_head", "*mlp_norm", "pre_attention_norm", "norm")
OTHERWISE: dict[str, dict[str, Any]] = {
    "gqa": {"microbatch_size": 2, "memory": Memory(attention="chunked", remat="full")},
    "mla": {"microbatch_size": 1},
}


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", ["mha", "gqa", "mla", pytest.param("mla-full-queries", marks=pytest.mark.slow)])
def test_steps_equal_the_replay(name: str, experiment: Callable[..., Experiment]) -> None:
    stored = REPLAYS[name]
    path = str(REFERENCE / stored["model"])
    program = compile(
        experiment(
            model=Model.HF(path, weights=Weights.HF(path)),
            objective=SFT,
            optimizer=muon(stored["max_attention_logit"]),
            frozen=FROZEN.get(name, MLA_FROZEN),
            **OTHERWISE.get(name, {}),
        )
    )
    state = program.init()
    for step, (batch, expected) in enumerate(zip(stored["batches"], stored["steps"], strict=True)):
        state, metrics = program.step(state, batch_of(batch))
        for key in ("loss", "grad_norm", "max_attention_logit"):
            # Float32 against float64; Newton-Schulz carries rounding on from step to step.
            assert float(metrics[key]) == pytest.approx(expected[key], rel=1e-4), (step, key)
        assert int(metrics["qk_clipped_heads"]) == expected["qk_clipped_heads"], step


def test_a_resumed_run_goes_on_with_equal_bits(experiment: Callable[..., Experiment]) -> None:
    stored = REPLAYS["mha"]
    model = Model.HF(path := str(REFERENCE / stored["model"]), weights=Weights.HF(path))
    tau = stored["max_attention_logit"]
    program = compile(experiment(model=model, objective=SFT, optimizer=muon(tau)))
    first, second = (batch_of(batch) for batch in stored["batches"][:2])
    state, _ = program.step(program.init(), first)
    saved = jax.tree.map(np.asarray, checkpoint_arrays(program, state))
    state, metrics = program.step(state, second)
    targets = checkpoint_targets(program)
    groups = {
        group: {path: jax.device_put(leaf, targets[group][path].sharding) for path, leaf in leaves.items()}
        for group, leaves in saved.items()
    }
    resumed, again = program.step(with_restored(program, program.init(), 1, groups), second)
    assert int(metrics["qk_clipped_heads"]) > 0
    for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((resumed, again)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_the_heads_own_columns_are_scaled() -> None:
    draw = np.random.default_rng(0)
    runs = ((2, 0.5), (1, 1.0), (2, 0.0))
    clip = QKClip(10.0, {"layers.blocks.0": (HeadColumns("attention.query", runs),)})
    path = "layers.blocks.0.attention.query"
    leaves = {
        f"{path}.kernel": draw.normal(size=(2, 3, 15)).astype(np.float32),  # two layers, three heads of five
        f"{path}.bias": draw.normal(size=(2, 15)).astype(np.float32),
        "embed.embedding": draw.normal(size=(4, 3)).astype(np.float32),
    }
    scores = np.array([[5.0, 40.0, -np.inf], [10.0, np.nan, 1000.0]], np.float32)
    actual = clip({name: jnp.asarray(leaf) for name, leaf in leaves.items()}, {"layers.blocks.0": jnp.asarray(scores)})
    factors = np.ones((2, 3, 5))
    for layer, head, gamma in ((0, 1, 0.25), (1, 2, 0.01)):
        factors[layer, head] = [gamma**0.5, gamma**0.5, gamma, 1, 1]
    is_one = (factors == 1).reshape(2, 15)
    for name, shape in (("kernel", (2, 1, 15)), ("bias", (2, 15))):
        before, after = leaves[f"{path}.{name}"], np.asarray(actual[f"{path}.{name}"])
        np.testing.assert_allclose(after, before * factors.reshape(shape), rtol=1e-6)
        untouched = np.broadcast_to(is_one.reshape(shape), before.shape)
        assert (after[untouched] == before[untouched]).all()  # bit for bit
    assert (np.asarray(actual["embed.embedding"]) == leaves["embed.embedding"]).all()


@pytest.mark.extended
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_maxima_of_blocks_are_those_of_all_scores(window: int | None, pairs: Callable[..., PairBatch]) -> None:
    batch = pairs(3, prompt=16, response=16)
    positions: TokenPositions = jax.tree.map(jnp.asarray, pair_positions(batch))
    draw = np.random.default_rng(1)
    query, key = (draw.normal(size=(3, 48, heads, 4)).astype(np.float32) for heads in (4, 2))
    mask = attention_mask(positions, positions, window)
    row = row_layout.pair(16, 16)
    nothing = jnp.zeros((3, 48, 0)), jnp.zeros((3, 48, 0))
    dense = View(AttentionMethod(window=window), positions, mask, nothing)
    blocks = View(AttentionMethod("chunked", row, window, queries=5), positions, None, nothing)
    fused = View(AttentionMethod("cudnn", row, window, queries=48), positions, None, nothing)
    order, segments, branch = (np.asarray(part) for part in positions)
    expected = np.full(4, -np.inf)
    for b in range(3):
        for i in range(48):
            for j in range(48):
                is_seen = segments[b, i] > 0 and segments[b, j] == segments[b, i] and order[b, j] <= order[b, i]
                is_seen &= branch[b, j] in (0, branch[b, i]) and (window is None or order[b, i] - order[b, j] < window)
                if is_seen:
                    score = 0.3 * np.sum(query[b, i] * np.repeat(key[b, j], 2, axis=0), axis=-1)
                    expected = np.maximum(expected, score)
    for view in (dense, blocks, fused):
        actual = max_logits(jnp.asarray(query), jnp.asarray(key), view, 0.3)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_reference_and_rows_of_no_weight(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch]
) -> None:
    """The policy's scores are read, not the reference's, in whatever micro-batches; without QK-clip nothing is."""
    batch = pairs(4)
    actual = {}
    for size, tau in ((None, 0.5), (2, 0.5), (2, None)):
        program = compile(
            experiment(model=Model.Llama3("tiny"), optimizer=muon(tau), microbatch_size=size, batch_size=4)
        )
        state = program.init()
        for _ in range(2):
            model: Any = program.policy_loss.policy.merge(state.trainable)
            tokens = jnp.concatenate([batch.prompt, batch.chosen, batch.rejected], axis=1)
            with recording_max_logits(True):
                out = model(tokens, pair_positions(batch), dtype=jnp.float32)
            expected = max(float(jnp.max(part)) for part in out.max_logits.values())
            state, metrics = program.step(state, batch)
            if tau is None:
                assert not {"max_attention_logit", "qk_clipped_heads"} & set(metrics)
            else:
                assert float(metrics["max_attention_logit"]) == pytest.approx(expected, rel=1e-5)
                assert int(metrics["qk_clipped_heads"]) > 0
        actual[size, tau] = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
    queries = [path for path in actual[2, 0.5] if path.endswith("query.kernel")]
    assert queries
    for path in queries:
        np.testing.assert_allclose(actual[2, 0.5][path], actual[None, 0.5][path], rtol=1e-3, atol=1e-5)
        assert np.abs(actual[2, 0.5][path]).max() < 0.9 * np.abs(actual[2, None][path]).max()


@pytest.mark.slow
def test_a_loss_that_compares_micro_batches(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch]
) -> None:
    actual = []
    for size in (4, 2):
        fields = {"objective": Objective.AOT(), "optimizer": muon(0.5), "microbatch_size": size}
        program = compile(experiment(model=Model.Llama3("tiny"), **fields))
        state = program.init()
        for _ in range(2):
            state, metrics = program.step(state, pairs(4))
        actual.append({name: float(metrics[name]) for name in ("loss", "max_attention_logit", "qk_clipped_heads")})
    assert actual[0]["qk_clipped_heads"] > 0
    assert actual[1] == pytest.approx(actual[0], rel=1e-4)


@pytest.mark.extended
def test_a_rejected_step_clips_nothing(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    spec = experiment(model=Model.Llama3("tiny"), objective=SFT, optimizer=muon(0.01), guard=Guard.Skip())
    program = compile(spec)
    state = program.init()
    path = "layers.blocks.0.attention.query.kernel"
    state.trainable[path] = state.trainable[path].at[0, 0, 0].set(jnp.nan)
    before = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
    state, metrics = program.step(state, sequences(4))
    assert int(metrics["skipped"]) == 1
    for path, leaf in before.items():
        np.testing.assert_array_equal(state.trainable[path], leaf)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": (
        {"adapter": Adapter.LoRA(rank=2)},
        "rescales the weights of queries and keys, which are frozen under adapter=Adapter.LoRA; unset it, or train all "
        "weights with adapter=None",
    ),
    "quantization": (
        {"quantization": Quantization.Int8Training()},
        "attention scores are not recorded with quantization=Quantization.Int8Training; unset one of them",
    ),
    "workers": (
        {"outer": Outer.DiLoCo(workers=2)},
        "each worker of outer= has its own weights and scores; unset one of them",
    ),
    "stages": (
        {"mesh": Mesh(stage=2), "model": Model.Llama3("tiny")},
        "attention scores are not recorded in mesh.stage=2; set 1",
    ),
    "mtp": (
        {
            "model": Model.DeepSeekV3("tiny", mtp_layers=1),
            "objective": attrs.evolve(SFT, mtp_loss_weight=0.1),
        },
        "the layer of objective.mtp_loss_weight is not rescaled; set that to 0",
    ),
    "norms": (
        {"model": Model.Qwen3("tiny")},
        "queries and keys are normalized (QK-norm), which undoes any scaling of their projections; unset it",
    ),
    "frozen": (
        {"model": Model.Llama3("tiny"), "frozen": ("query",)},
        "rescales query and key projections, and 'layers.blocks.0.attention.query.kernel' is frozen; train it too",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_it_cannot_act_on_is_refused(name: str, experiment: Callable[..., Experiment]) -> None:
    fields, message = REFUSED[name]
    with pytest.raises((SpecError, PlanError)) as caught:
        build_blueprint(experiment(**{"objective": SFT, **fields, "optimizer": muon(100.0)}))
    assert f"  optimizer.max_attention_logit: {message}\n" in str(caught.value) + "\n"


def test_thresholds_are_positive() -> None:
    with pytest.raises(SpecError, match=r"max_attention_logit: expected a value > 0, got 0.0"):
        muon(0.0)
