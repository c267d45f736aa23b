"""Groups of completions that share their prompt in a row: the same step as with a row for each completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab import samples
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    AdaptiveEntropy,
    Data,
    Distance,
    Experiment,
    Guard,
    Memory,
    Mesh,
    Model,
    Objective,
    Reward,
    TeacherServer,
    compile,
)
from nnxdsl.data.batch import PER_COMPLETION, GroupBatch, RolloutBatch, non_padding_fraction, token_count
from nnxdsl.optim import step_guard
from nnxdsl.program.batches import Lengths, kind_of
from nnxdsl.program.blueprint import build_blueprint

PROMPTS = Data.Prompts("none.jsonl", max_prompt_length=8, max_completion_length=8)
PAIRS = Data.Preferences("none.jsonl", max_prompt_length=8, max_completion_length=8)
REWARDS = (Reward("none"),)
ENTROPY = Objective.GSPO(
    rewards=REWARDS, num_generations=4, num_iterations=2, beta=0.1, entropy_coef=0.3, top_entropy_quantile=0.5
)


def completions(vocab_size: int, *, groups: int = 2, group: int = 4) -> tuple[RolloutBatch, GroupBatch]:
    """The same completions in rows of their own, and in rows of a group; one is left out, with weight 0."""
    draw = np.random.default_rng(3)
    prompt, response, rows = draw.integers(1, 9, groups), draw.integers(1, 9, (groups, group)), groups * group
    prompts = [draw.integers(1, vocab_size, n).astype(np.int32) for n in prompt]
    tokens, ids = np.zeros((rows, 16), np.int32), np.zeros((rows, 8), np.int32)
    left = np.zeros((groups, 8), np.int32)
    for row, length in enumerate(response.reshape(-1)):
        ours = prompts[row // group]
        ids[row, :length] = draw.integers(1, vocab_size, length)
        tokens[row, : len(ours) + length] = [*ours, *ids[row, :length]]
        left[row // group, 8 - len(ours) :] = ours
    mask = np.arange(8) < response.reshape(-1)[:, None]
    weight = np.ones(rows, np.float32)
    weight[1] = 0
    advantages = (draw.normal(size=(rows, 1)) * mask).astype(np.float32)
    old = (draw.normal(-3, 0.3, (rows, 8)) * mask).astype(np.float32)
    limit = np.full(rows, 8, np.float32)
    length = (np.repeat(prompt, group) + response.reshape(-1)).astype(np.int32)
    alone = RolloutBatch(
        tokens, length, ids, response.reshape(-1).astype(np.int32), mask, weight, advantages, limit, old
    )
    own_arrays = {n: getattr(alone, n) for n in PER_COMPLETION if getattr(alone, n) is not None}
    joined = GroupBatch(
        left, prompt.astype(np.int32), **{n: x.reshape(groups, group, *x.shape[1:]) for n, x in own_arrays.items()}
    )
    return alone, joined


def step(asked: Experiment, batch: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    program = compile(asked, jax.devices()[: asked.mesh.device_count])
    state = samples.trained(program)
    state, metrics = program.step(state, batch)
    return {name: float(value) for name, value in metrics.items()}, jax.device_get(state.trainable)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": Adapter.LoRA(rank=2), "microbatch_size": 4},
        {"objective": ENTROPY, "adapter": Adapter.LoRA(rank=2), "microbatch_size": 4},
        {"memory": Memory(attention="chunked", reference="online")},
        {"model": Small(layers=3, pattern=2, window=5, heads=4)},
        {"model": Model.Qwen3Next("tiny")},
        {"model": Model.NemotronH("tiny")},
        {"model": Model.DeepSeekV3("tiny")},
        {"model": Model.Gemma3("tiny")},
    ],
    ids=str,
)
def test_a_step_is_that_of_completions_alone(fields: dict[str, Any], experiment: Callable[..., Experiment]) -> None:
    objective = Objective.GRPO(rewards=REWARDS, num_generations=4, num_iterations=2, beta=0.1)
    defaults = {"memory": Memory(reference="online"), "batch_size": 8}
    asked = experiment(**{"objective": objective, "data": PROMPTS, **defaults, **fields})
    alone, joined = completions(build_blueprint(asked).config.vocab_size)
    if asked.objective.top_entropy_quantile < 1:
        chosen = alone.loss_mask & (np.random.default_rng(4).random(alone.loss_mask.shape) < 0.5)
        alone = alone._replace(entropy_mask=chosen)
        joined = joined._replace(entropy_mask=chosen.reshape(joined.loss_mask.shape))
    expected, leaves = step(attrs.evolve(asked, microbatch_size=None), alone)
    actual, others = step(asked, joined)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name not in ("tokens", "num_tokens"):
            assert actual[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    for path, leaf in leaves.items():
        np.testing.assert_allclose(others[path], leaf, rtol=1e-4, atol=2e-6, err_msg=path)


@pytest.mark.extended
@pytest.mark.parametrize("fields", [{}, {"microbatch_size": 4, "guard": Guard.Skip()}], ids=str)
def test_a_step_has_the_weight_of_entropies_that_its_state_says(
    fields: dict[str, Any], experiment: Callable[..., Experiment]
) -> None:
    """No bonus in the first step, then that of a constant weight; the weight grows by delta after each."""

    def program_of(**settings: Any) -> tuple[Any, Any]:
        objective = Objective.GRPO(rewards=REWARDS, num_generations=4, num_iterations=2, beta=0.0, **settings)
        program = compile(experiment(objective=objective, data=PROMPTS, batch_size=8, **fields))
        return program, samples.trained(program)

    program, state = program_of(entropy_coef=0.2, adaptive_entropy=AdaptiveEntropy(target=9.0, delta=0.1))
    alone, joined = completions(program.blueprint.config.vocab_size)
    for applied in (0.0, 0.3, 0.4):
        constant, other = program_of(entropy_coef=applied)
        optimizer = step_guard.with_inner(state.optimizer, step_guard.inner(state.optimizer).inner)
        other = jax.tree.map(jnp.copy, other._replace(trainable=state.trainable, optimizer=optimizer, step=state.step))
        other, expected = constant.step(other, alone)
        state, metrics = program.step(state, joined)
        assert float(metrics["entropy_coef"]) == pytest.approx(0.1 + max(applied, 0.2), rel=1e-6)
        for name in ("loss", "grad_norm"):
            assert float(metrics[name]) == pytest.approx(float(expected[name]), rel=2e-5), name
        for path, leaf in other.trainable.items():
            np.testing.assert_allclose(state.trainable[path], leaf, rtol=1e-4, atol=2e-6, err_msg=path)


def test_what_a_batch_counts() -> None:
    alone, joined = completions(32)
    kind, (_, padded) = kind_of(joined), kind_of(joined).padded(joined)
    assert padded == Lengths(8 + 4 * 8, 4 * 8)
    lengths, others = kind.lengths(joined), kind_of(alone).lengths(alone._replace(weight=np.ones(8, np.float32)))
    saved = 3 * int(joined.prompt_length.sum())
    assert lengths.targets == others.targets
    assert lengths.tokens == others.tokens - saved == int(token_count(joined))
    assert lengths.attended_pairs(None) < others.attended_pairs(None)
    assert non_padding_fraction(joined) == lengths.tokens / (2 * (8 + 32))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 4),
        ({"microbatch_size": 4}, 4),
        ({"microbatch_size": 2}, 1),  # less than a group
        ({"mesh": Mesh(fsdp=2)}, 4),
        ({"mesh": Mesh(data=2, fsdp=2)}, 1),  # two groups do not fill four devices
        ({"mesh": Mesh(context=2)}, 1),
        ({"mesh": Mesh(stage=2), "model": Small(layers=4)}, 1),
        (
            {
                "objective": Objective.DPO(),
                "data": Data.Preferences("none.jsonl", max_prompt_length=8, max_completion_length=8),
            },
            1,
        ),
    ],
    ids=str,
)
def test_groups_share_a_row_where_they_fill_it(
    fields: dict[str, Any], count: int, experiment: Callable[..., Experiment]
) -> None:
    objective = Objective.GRPO(rewards=REWARDS, num_generations=4, beta=0.0)
    asked = experiment(**{"objective": objective, "data": PROMPTS, "batch_size": 8, **fields})
    blueprint = build_blueprint(asked)
    assert blueprint.num_generations == count
    if asked.objective is objective:
        assert blueprint.rows_at_once == asked.rows_at_once // count
        assert blueprint.longest == (Lengths(40, 32) if count == 4 else Lengths(16, 8))


def of_shapes(batch: Any) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) for name, x in batch._asdict().items() if x is not None}


def test_the_program_is_compiled_ahead_of_time_for_groups(experiment: Callable[..., Experiment]) -> None:
    objective = Objective.RLOO(rewards=REWARDS, num_generations=4, num_iterations=2, top_entropy_quantile=0.5)
    asked = experiment(objective=objective, data=PROMPTS, batch_size=8, memory=Memory(reference="online"))
    program = compile(asked)
    joined = completions(program.blueprint.config.vocab_size)[1]
    logps, mask = joined.old_logps, joined.loss_mask
    scored = joined._replace(ref_logps=logps, sampler_logps=logps, entropy_mask=mask)
    assert of_shapes(program.lower().args_info[0][3]) == of_shapes(scored)
    teacher, distance = TeacherServer("http://localhost:1"), Distance.SampledReverseKL()
    objective = Objective.OnPolicyDistill(num_generations=4, teacher_server=teacher, distance=distance)
    taught = joined._replace(old_logps=None, sampler_logps=logps, teacher_logps=logps)
    program = compile(experiment(objective=objective, data=PROMPTS, batch_size=8))
    assert of_shapes(program.lower().args_info[0][3]) == of_shapes(taught)
    several = {"a": teacher, "b": teacher}
    objective = attrs.evolve(objective, teacher_server=None, teacher_servers=several)
    taught = taught._replace(teacher_index=joined.completion_length)
    program = compile(experiment(objective=objective, data=PROMPTS, batch_size=8))
    assert of_shapes(program.lower().args_info[0][3]) == of_shapes(taught)
    likely = {"teacher_top_ids": np.zeros((*mask.shape, 5), np.int32), "teacher_top_logps": np.zeros((*mask.shape, 6))}
    likely = {name: array.astype(np.int32 if "ids" in name else np.float32) for name, array in likely.items()}
    objective = attrs.evolve(objective, teacher_top_k=5, distance=Distance.ReverseKL())
    program = compile(experiment(objective=objective, data=PROMPTS, batch_size=8))
    assert of_shapes(program.lower().args_info[0][3]) == of_shapes(taught._replace(teacher_logps=None, **likely))
