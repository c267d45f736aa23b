"""The loss of indexers against torch's figures: value, gradient, stages, packing, meshes; what cannot have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexer_rows import REFERENCE, batch_of, expected_figures, model_of

from nnxdsl import (
    Adapter,
    Batching,
    Data,
    Experiment,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Quantization,
    Schedule,
    SpecError,
    Weights,
    compile,
)
from nnxdsl.config.core.run_id import canonical
from nnxdsl.data.batch import SequenceBatch
from nnxdsl.formats import hf
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.params import is_indexer_param
from nnxdsl.planning.flops import work
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.program.compile import Program
from nnxdsl.program.gradients.accumulation import mean_grads
from nnxdsl.program.memory import activations, rollout_memory

NAMES = ("deepseek_v32", "glm_moe_dsa")
TOLERANCE = 1e-5
"""Of losses, of the gradient's length, and of the largest number of each gradient."""
SFT = Objective.SFT(loss_on="all")
WARMUP = {"indexer_stage": "dense_warmup", "indexer_loss_coef": 1.0}


def gradients(program: Program, batch: Any) -> tuple[dict[str, np.ndarray], Any]:
    state = program.init()
    learnt = jax.jit(partial(mean_grads, program.policy_loss, program.experiment.microbatches))
    placed = program.shard_batch(batch)
    return jax.device_get(learnt(state.trainable, state.frozen, state.reference, placed, None))


def mean(value: Any) -> float:
    return float(value.total / value.count)


def check_indexers(result: dict[str, np.ndarray], name: str, stage: str, coef: float) -> None:
    """Gradients of indexers are `coef` times those of the reference."""
    figures, config = expected_figures(name), hf.read_config(REFERENCE / "families" / name)
    sources = {path: source for path, source in tensor_sources(config, name).items() if is_indexer_param(path)}
    assert {path for path in result if is_indexer_param(path)} == sources.keys()
    for path, source in sources.items():
        parts = [figures[f"{stage}/to.model.{tensor}"] for tensor in source.names]
        parts = [part.T if source.transposed else part for part in parts]
        theirs = coef * (np.stack(parts) if source.leading else parts[0])
        np.testing.assert_allclose(result[path], theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max(), err_msg=path)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek_v32", {}),
        pytest.param(
            "glm_moe_dsa",
            {"batching": Batching.Packed(), "memory": Memory(attention="chunked", remat="full")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek_v32", {"microbatch_size": 2, "memory": Memory(remat="attention")}, marks=pytest.mark.slow
        ),
        pytest.param("glm_moe_dsa", {"microbatch_size": 4}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa_shared", {"memory": Memory(remat="full")}, marks=pytest.mark.slow),
    ],
    ids=["padded", "packed-chunked-remat", "micro-batches-remat", "micro-batches", "shared-remat"],
)
def test_sparse_stage_equals_the_reference(
    experiment: Callable[..., Experiment], name: str, fields: dict[str, Any]
) -> None:
    figures = expected_figures(name)
    program = compile(experiment(model=model_of(name, indexer_loss_coef=0.5), objective=SFT, batch_size=8, **fields))
    actual, terms = gradients(program, batch_of(program, name))
    assert mean(terms.metrics["indexer_loss"]) == pytest.approx(float(figures["sparse/indexer_loss"]), rel=TOLERANCE)
    assert mean(terms.loss) == pytest.approx(float(figures["sparse/loss"]), rel=TOLERANCE)
    both = figures["sparse/loss"] + 0.5 * figures["sparse/indexer_loss"]
    assert float(program.policy_loss.loss.mean(terms)) == pytest.approx(float(both), rel=TOLERANCE)
    check_indexers(actual, name, "sparse", 0.5)
    # Those of all others are of the objective alone.
    others = [leaf for path, leaf in actual.items() if not is_indexer_param(path)]
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in others))
    assert norm == pytest.approx(float(figures["sparse/norm"]), rel=TOLERANCE)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("glm_moe_dsa", {"microbatch_size": 2}),
        pytest.param("deepseek_v32", {"batching": Batching.Packed()}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa_shared", {}, marks=pytest.mark.slow),
    ],
)
def test_dense_warmup_equals_the_reference(
    experiment: Callable[..., Experiment], name: str, fields: dict[str, Any]
) -> None:
    figures = expected_figures(name)
    program = compile(experiment(model=model_of(name, **WARMUP), objective=SFT, batch_size=8, **fields))
    assert program.blueprint.trainable
    assert all(map(is_indexer_param, program.blueprint.trainable))  # and all else is frozen
    actual, terms = gradients(program, batch_of(program, name))
    assert mean(terms.metrics["indexer_loss"]) == pytest.approx(
        float(figures["dense_warmup/indexer_loss"]), rel=TOLERANCE
    )
    assert mean(terms.loss) == pytest.approx(float(figures["dense_warmup/loss"]), rel=TOLERANCE)
    check_indexers(actual, name, "dense_warmup", 1.0)


@pytest.mark.extended
def test_neither_loss_reaches_the_arrays_of_the_other(experiment: Callable[..., Experiment]) -> None:
    model = Model.DeepSeekV32("tiny", indexer_loss_coef=1.0)
    program = compile(experiment(model=model, objective=SFT, data=Data.Text("none.jsonl", max_length=48)))
    tokens = np.random.default_rng(0).integers(0, 320, (2, 48)).astype(np.int32)
    batch = SequenceBatch(tokens, np.full(2, 48, np.int32), tokens >= 0, np.ones(2, np.float32))
    state = program.init()
    forward = program.policy_loss.make_forward(state.frozen, program.shard_batch(batch))

    @jax.jit
    def both(leaves: dict[str, jax.Array]) -> Any:
        def losses(leaves: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = forward(leaves)
            assert out.indexer_stats is not None
            return -jnp.sum(out.token_stats.logp), out.indexer_stats.divergence

        _, back = jax.vjp(losses, leaves)
        return back((jnp.ones(()), jnp.zeros(())))[0], back((jnp.zeros(()), jnp.ones(())))[0]

    of_main, of_indexer = jax.device_get(both(dict(state.trainable)))
    for path in of_main:
        ours, other = (of_indexer, of_main) if is_indexer_param(path) else (of_main, of_indexer)
        assert np.abs(ours[path]).max() > 0 or "router.correction" in path, path
        np.testing.assert_array_equal(other[path], 0.0, err_msg=path)


@pytest.mark.extended
def test_without_the_loss_indexers_stay_as_they_are(experiment: Callable[..., Experiment]) -> None:
    for fields in (
        {"objective": SFT},
        {},
        {"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.NF4(block_size=32)},
    ):
        blueprint = build_blueprint(experiment(model=Model.GLM5("tiny"), **fields))
        indexers = {path for path in blueprint.base if is_indexer_param(path)}
        assert indexers
        assert indexers <= set(blueprint.frozen)  # in their own dtype, and without adapters


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sparse", "dense_warmup"])
def test_training_lowers_it(experiment: Callable[..., Experiment], stage: str) -> None:
    rows, length = 4, 48
    model = Model.DeepSeekV32("tiny", indexer_loss_coef=1.0, indexer_stage=stage)
    optimizer = Optimizer.AdamW(schedule=Schedule.Constant(lr=3e-3))
    program = compile(
        experiment(
            model=model,
            objective=SFT,
            data=Data.Text("none.jsonl", max_length=length),
            batch_size=rows,
            optimizer=optimizer,
        )
    )
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 320, (rows, length)).astype(np.int32)
    batch = SequenceBatch(tokens, np.full(rows, length, np.int32), tokens >= 0, np.ones(rows, np.float32))
    state, actual = program.init(), []
    first = jax.device_get(dict(state.frozen))
    for _ in range(30):
        state, metrics = program.step(state, batch)
        actual.append(float(metrics["indexer_loss"]))
    assert actual[-1] < 0.7 * actual[0], actual
    for path, leaf in first.items():
        np.testing.assert_array_equal(state.frozen[path], leaf, err_msg=path)
    held_out = program.evaluate(state, batch)
    assert mean(held_out["indexer_loss"]) < 0.7 * actual[0]


@pytest.mark.slow
def test_pairs_in_micro_batches_with_routers_are_as_at_once(experiment: Callable[..., Experiment], pairs: Any) -> None:
    actual = []
    for size in (4, 2):
        model = model_of("deepseek_v32", indexer_loss_coef=0.5, router_aux_loss_coef=0.1)
        program = compile(experiment(model=model, batch_size=4, microbatch_size=size))
        state, metrics = program.step(program.init(), pairs(4))
        actual.append((jax.device_get(state.trainable), {name: float(value) for name, value in metrics.items()}))
    (one, said), (other, also) = actual
    assert also == pytest.approx(said, rel=1e-5)
    assert said["indexer_loss"] > 0
    for path, leaf in one.items():
        np.testing.assert_allclose(other[path], leaf, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_meshes_agree(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_indexer.py")
    for name, actual in report.items():
        kind = name.partition("-")[0]
        wanted = report[f"{kind}-one" if kind in ("warmup", "frozen") else "one"]["metrics"]
        assert ("indexer_loss" in wanted) == (kind != "frozen")
        assert actual["metrics"] == pytest.approx(wanted, rel=TOLERANCE), name
        assert actual["away"] < TOLERANCE, name  # of the largest weight, after two steps


@pytest.mark.extended
def test_plans_count_the_selection_the_indexers_and_their_cache(experiment: Callable[..., Experiment]) -> None:
    tokens = np.zeros((1, 48), np.int32)
    batch = SequenceBatch(tokens, np.array([48], np.int32), tokens >= 0, np.ones(1, np.float32))
    data = Data.Text("none.jsonl", max_length=48)

    def blueprint_of(model: Model) -> Blueprint:
        return build_blueprint(experiment(model=model, objective=SFT, data=data, batch_size=1))

    dense, sparse, learnt, warmup = map(
        blueprint_of,
        (
            Model.DeepSeekV3("tiny"),
            Model.DeepSeekV32("tiny"),
            Model.DeepSeekV32("tiny", indexer_loss_coef=1.0),
            Model.DeepSeekV32("tiny", **WARMUP),
        ),
    )
    layers, heads, widths = 4, 4, 48 + 32  # of a head's key and value
    pairs, selected = 48 * 49 // 2, 32 * 33 // 2 + 16 * 32
    attention, left_out = (2 * layers * heads * widths * count for count in (pairs, pairs - selected))
    # 4 heads of 32 numbers, from compressed queries of 64 and states of 128 numbers; one key, one weight for each head.
    products = 2 * layers * (64 * 128 + 128 * 32 + 128 * 4) * 48
    scores = 2 * layers * 4 * 32 * pairs
    plain, base = work(sparse, batch).model_flops, work(dense, batch).model_flops
    assert plain == base - 3 * left_out + products + scores
    assert work(learnt, batch).model_flops == plain + products + 2 * scores
    forward = (base - 3 * attention) / 3
    assert work(warmup, batch).model_flops == forward + attention + 2 * products + 3 * scores
    for blueprint in (sparse, learnt, warmup):
        assert work(blueprint, batch).executed >= work(blueprint, batch).model_flops
    longest = lengths(data)
    cache = [jax.eval_shape(partial(init_cache, one.config, 1, longest.trunk, "float32")) for one in (dense, sparse)]
    sizes = [sum(leaf.size * 4 for leaf in jax.tree.leaves(one.layers)) for one in cache]
    assert sizes[1] - sizes[0] == 4 * layers * longest.trunk * 32  # one key of 32 numbers for each token
    assert rollout_memory(sparse, longest).cache > sizes[1]
    held = [activations(blueprint, 1, "none").trunk for blueprint in (sparse, learnt)]
    assert held[1] > held[0]


@pytest.mark.extended
def test_plans_count_the_indexers_of_the_layers_that_select(experiment: Callable[..., Experiment]) -> None:
    name, length = "glm_moe_dsa_shared", 20
    tokens = np.zeros((1, length), np.int32)
    batch = SequenceBatch(tokens, np.array([length], np.int32), tokens >= 0, np.ones(1, np.float32))
    data = Data.Text("none.jsonl", max_length=length)
    plain, learnt = (
        build_blueprint(
            experiment(model=model_of(name, indexer_loss_coef=coef), objective=SFT, data=data, batch_size=1)
        )
        for coef in (0.0, 1.0)
    )
    # 16 heads of 10 numbers, from compressed queries of 16 and states of 24; one key, one weight for each head.
    products = 2 * 4 * (16 * 160 + 24 * 10 + 24 * 16) * length
    scores = 2 * 4 * 160 * length * (length + 1) // 2
    assert work(learnt, batch).model_flops == work(plain, batch).model_flops + products + 2 * scores
    assert work(learnt, batch).executed >= work(learnt, batch).model_flops


def test_what_cannot_have_it_says_so(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    def problems(model: Model, **fields: Any) -> list[str]:
        with pytest.raises(SpecError) as raised:
            experiment(**{"objective": SFT, "model": model, **fields})
        return [str(problem) for problem in raised.value.problems]

    sparse, warmup = (Model.DeepSeekV32("tiny", indexer_loss_coef=1.0, indexer_stage=stage)
                      for stage in ("sparse", "dense_warmup"))  # fmt: skip
    trains = "indexer_stage='dense_warmup' trains the indexers alone"
    assert problems(sparse, mesh=Mesh(stage=2)) == [
        "model.indexer_loss_coef: statistics of indexers are not available under pipeline parallelism; set 0"
    ]
    whole = "model.indexer_loss_coef: indexers are trained whole, without Adapter.LoRA; set 0, or adapter=None"
    assert problems(sparse, adapter=Adapter.LoRA()) == [whole]
    assert problems(warmup, adapter=Adapter.LoRA(), quantization=Quantization.NF4()) == [
        whole,
        f"quantization: {trains}, which no quantization applies to: Quantization.NF4 has no use; set None",
    ]
    assert problems(Model.GLM5("tiny", indexer_stage="dense_warmup")) == [
        "model.indexer_loss_coef: is 0, and nothing else is trained in indexer_stage='dense_warmup'; set it above 0"
    ]
    assert problems(warmup, objective=Objective.DPO()) == [
        f"objective: {trains}, from texts, and Objective.DPO has no effect on them; use Objective.SFT()"
    ]
    assert problems(warmup, objective=Objective.SFT(loss_on="all", z_loss=1e-4), frozen=("embed",)) == [
        f"objective.z_loss: has no effect: {trains}; set 0",
        f"frozen: has no effect: {trains}; leave it empty",
    ]
    taught = Objective.Distill(teacher=Model.GLM5("tiny"), loss_on="all")
    assert problems(warmup, objective=taught) == [
        f"objective: {trains}, from texts, and Objective.Distill has no effect on them; use Objective.SFT()"
    ]
    routed = Model.GLM5("tiny", indexer_loss_coef=1.0, indexer_stage="dense_warmup", router_aux_loss_coef=0.1)
    assert problems(routed) == [f"model.router_aux_loss_coef: has no effect: {trains}; set 0"]
    with pytest.raises(SpecError, match=r"indexer_stage: expected .*'sparse'.*'dense_warmup'.*, got 'warmup'"):
        Model.DeepSeekV32("tiny", indexer_stage="warmup")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match=r"frozen: freezes all indexers, which model.indexer_loss_coef trains"):
        build_blueprint(experiment(model=sparse, objective=SFT, frozen=("indexer",)))
    directory = REFERENCE / "families" / "deepseek_v3"
    plain = Model.HF(str(directory), weights=Weights.HF(str(directory)), indexer_loss_coef=0.1)
    with pytest.raises(PlanError, match=r"model.indexer_loss_coef: has no effect: the model has no indexers"):
        build_blueprint(experiment(model=plain, objective=SFT))
    kernel = r"memory.attention: 'splash' cannot serve: splash attention is to all tokens, not to 32 that"
    with pytest.raises(PlanError, match=kernel):
        build_blueprint(experiment(model=sparse, objective=SFT, memory=Memory(attention="splash")), platform="tpu")


def test_weights_of_a_warmup_are_those_of_the_sparse_stage(experiment: Callable[..., Experiment]) -> None:
    earlier = experiment(model=Model.DeepSeekV32("tiny", **WARMUP), objective=SFT)
    later = Model.DeepSeekV32("tiny", indexer_loss_coef=0.1, weights=Weights.From(earlier))
    assert experiment(model=later).model.network == earlier.model.network


def test_ids_of_directories_have_it_where_it_is_set() -> None:
    data = Data.Text("none.jsonl")
    plain, asked = (
        Experiment(name="x", model=Model.HF("somewhere", **fields), objective=SFT, data=data)
        for fields in ({}, {"indexer_loss_coef": 0.1})
    )
    assert "indexer" not in canonical(plain)
    assert json.loads(canonical(asked))["model"]["indexer_loss_coef"] == 0.1
