"""Router replay: tokens go to the same experts in training as in sampling, in each kind of batch and after a resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import (
    Data,
    Engine,
    Experiment,
    Mesh,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Reward,
    Schedule,
    SpecError,
    compile,
    evolve,
    reward,
)
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.generate.sampler import Completion, Sampler
from nnxdsl.models.moe.router import ROUTED_EXPERTS
from nnxdsl.program.batches import kind_of
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import Program
from nnxdsl.program.memory import rollout_memory
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.rollouts.turns import Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small


@reward("size")
def size(completion: str) -> float:
    return float(len(completion))


# Keys and values in 8 bits: routers of the trainer would send some tokens elsewhere.
GRPO = Objective.GRPO(
    rewards=(Reward("size"),), num_generations=2, num_iterations=2, router_replay=True, kv_cache_dtype="int8"
)
MODELS = {"softmax": Model.Mixtral("tiny"), "sigmoid, after dense layers": Model.DeepSeekV3("tiny")}
Made = tuple[Program, Rollouts]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    rows = ({"prompt": f"Say {'na' * (n % 3)}{n}: "} for n in range(6))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Experiment(
        name="replay",
        model=MODELS["softmax"],
        objective=GRPO,
        data=Data.Prompts(str(path), max_prompt_length=32, max_completion_length=8),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=4,
        steps=4,
    )


def rollouts(program: Program) -> Rollouts:
    prompts = load(program.experiment.data, BytesTokenizer())
    assert isinstance(prompts, Prompts)
    return Rollouts.of(program, prompts, BytesTokenizer())


@pytest.fixture(scope="module")
def make(experiment: Experiment) -> Callable[[str], Made]:
    def made(name: str) -> Made:
        program = compile(evolve(experiment, {"model": MODELS[name]}))
        return program, rollouts(program)

    return cache(made)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", MODELS)
def test_experts_in_training_are_those_of_sampling(make: Callable[[str], Made], name: str) -> None:
    program, made = make(name)
    state = program.init()
    batch, (template, leaves) = made.rollout_at(0, state).batch, program.policy(state)
    grouped = made.train_batch(batch)
    assert type(grouped) is not type(batch)
    for each in (batch, grouped):
        rows = kind_of(each).rows(each)

        @jax.jit
        def routed(leaves: Any, replayed: Any, rows: Any = rows) -> Any:
            model: Any = template.merge(leaves)
            with ROUTED_EXPERTS.recording(True):
                options = {"dtype": jnp.float32, "routed_experts": replayed}
                return model(jnp.asarray(rows.tokens), rows.positions, **options).routed_experts

        sampled, is_real = np.asarray(rows.routed_experts), np.asarray(rows.positions.segment_ids) > 0
        has_experts = (sampled[is_real] >= 0).all(axis=(0, 2))  # [layers]
        assert has_experts.tolist() == [bool(layer) or name == "softmax" for layer in range(len(has_experts))]
        assert (sampled[~is_real] == -1).all()
        np.testing.assert_array_equal(np.asarray(routed(leaves, rows.routed_experts))[is_real], sampled[is_real])
        selected = np.asarray(routed(leaves, None))[is_real]
        assert 0.9 < (selected == sampled[is_real]).mean() < 1.0  # of the same tokens, but for rounding


def test_routers_learn_and_later_updates_replay_the_same(make: Callable[[str], Made]) -> None:
    program, made = make("softmax")
    state = program.init()
    rollout = made.rollout_at(0, state)
    batch = rollout.batch._replace(advantages=np.where(np.arange(4) % 2, 1.0, -1.0)[:, None] * rollout.batch.loss_mask)
    score = np.asarray(program.score(state, made.train_batch(batch)).token_stats.logp)
    np.testing.assert_allclose(score, batch.old_logps, atol=1e-6)
    experts = batch.routed_experts
    elsewhere = made.train_batch(batch._replace(routed_experts=np.where(experts >= 0, (experts + 1) % 4, experts)))
    assert np.abs(np.asarray(program.score(state, elsewhere).token_stats.logp) - score)[batch.loss_mask].max() > 1e-3
    stored = json.loads(json.dumps(made.state(1)))
    before = {path: np.asarray(leaf) for path, leaf in program.policy(state)[1].items() if "router.weight" in path}
    state, _ = program.step(state, made.train_batch(batch))
    after = program.policy(state)[1]
    assert before
    assert all(np.abs(np.asarray(after[path]) - old).max() > 0 for path, old in before.items())
    resumed = rollouts(program)
    resumed.check(stored)
    for one, other in zip(resumed.rollout_at(1, state).batch, rollout.batch, strict=True):
        np.testing.assert_array_equal(one, other)


def test_turns_have_the_experts_of_where_they_were_first_computed() -> None:
    trajectory, routed = Trajectory(), np.arange(10, dtype=np.int16)[:, None, None]
    for end, ids in ((5, [3, 4]), (10, [7, 8, 9])):  # a prompt of 3, an observation of 2
        experts = routed[:end] + 100 * len(trajectory.routed_experts)
        completion = Completion(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0, experts.astype(np.int16))
        trajectory.add_completion(completion, "", ())
    actual = np.concatenate(trajectory.routed_experts)[:, 0, 0]
    assert actual.tolist() == [0, 1, 2, 3, 4, 105, 106, 107, 108, 109]


def test_a_plan_counts_the_experts_of_tokens(experiment: Experiment) -> None:
    replaying, plain = (
        rollout_memory(build_blueprint(evolve(experiment, {"objective.router_replay": each})), lengths(experiment.data))
        for each in (True, False)
    )
    layers = build_blueprint(experiment).config.layers.num_layers
    # 4 completions of 8 tokens and 2 prompts of 32, each to 2 experts, of two bytes
    assert replaying.cache - plain.cache == (4 * 8 + 2 * 32) * layers * 2 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": Small(layers=1, pattern=1)}, "router_replay: has no effect: the model has no experts"),
        ({"mesh": Mesh(stage=2)}, "router_replay: is not supported with pipeline parallelism; set mesh.stage=1"),
        (
            {"objective.engine": Engine.Server("http://localhost:8000"), "objective.kv_cache_dtype": None},
            "router_replay: needs the experts of sampled tokens, which an engine does not return; set False",
        ),
    ],
    ids=["no experts", "stages", "a server"],
)
def test_what_replays_nothing_is_refused(experiment: Experiment, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, PlanError), match=message):
        build_blueprint(evolve(experiment, fields))


def test_a_sampler_without_experts_returns_none(experiment: Experiment) -> None:
    changes = {"model": Small(layers=1, pattern=1), "objective.router_replay": False}
    blueprint = build_blueprint(evolve(experiment, changes))
    with pytest.raises(ValueError, match=r"^returns_experts: the model has no experts"):
        Sampler(blueprint.policy, blueprint.config, blueprint.compute, (), returns_experts=True)
