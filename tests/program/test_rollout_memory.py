"""What a plan says of answers: the cache of their keys and values, where it is more than the step takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Objective, Reward
from nnxdsl.planning.plan import plan
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import memory, rollout_memory

PROMPTS = Data.Prompts("none.jsonl", max_prompt_length=16, max_completion_length=48)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=4)])
def test_the_cache_is_counted_where_it_is_the_most(mesh: Mesh, experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4),
        data=PROMPTS,
        model=Small(layers=4, heads=4, head_dim=16, pattern=1),
        batch_size=4096,
        microbatch_size=4,
        memory=Memory(remat="full", reference="online"),
        mesh=mesh,
    )
    blueprint, longest = build_blueprint(asked), lengths(PROMPTS)
    assert longest == Lengths(64, 48)
    found = rollout_memory(blueprint, longest)
    rows = 4096 // mesh.fsdp
    keys = 4 * 2 * 2 * 16  # layers, key and value, heads of them, their width
    assert (found.rows, found.tokens, found.copies) == (rows, 64, 0)
    assert rows * 64 * keys * 4 <= found.cache < 1.1 * rows * 64 * keys * 4
    parts = {part.name: part.bytes for part in memory(blueprint, longest)}
    step = sum(parts[name] for name in ("gradients", "activations", "workspace"))
    assert parts["generation"] == found.cache - step
    assert plan(asked)["tokens_at_most"] == 10 * 4096 * 64


def test_it_is_left_out_where_the_step_takes_more(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4), data=PROMPTS, model=Small()
    )
    assert "generation" not in {part.name for part in memory(build_blueprint(asked), lengths(PROMPTS))}
