"""What a plan says of completions: the bytes that the sampler holds, where these are more than the step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Objective, Reward
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.params import is_stacked
from nnxdsl.planning.plan import plan
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import memory, rollout_memory

PROMPTS = Data.Prompts("none.jsonl", max_prompt_length=16, max_completion_length=48)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=4)])
def test_slots_and_prefixes_are_counted_and_not_rows(mesh: Mesh, experiment: Callable[..., Experiment]) -> None:
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
    assert blueprint.num_generations == (4 if mesh.fsdp == 1 else 1)
    found = rollout_memory(blueprint, longest)
    assert (found.rows, found.tokens) == (64 // mesh.fsdp, 64)
    keys = 4 * 2 * 2 * 16  # layers, key and value, heads of them, their width
    # 64 completions of 48 tokens, twice the 16 prefixes of 16 tokens that they have at first, 16 prompts at one time
    tokens = (64 * 48 + 2 * 16 * 16 + 16 * 16) // mesh.fsdp
    assert tokens * keys * 4 <= found.cache < 1.1 * tokens * keys * 4
    parts = {part.name: part.bytes for part in memory(blueprint)}
    step = sum(parts[name] for name in ("gradients", "activations", "workspace"))
    assert parts.get("generation", 0) == max(found.total - step, 0)
    by_group = 16 + 4 * 48 if mesh.fsdp == 1 else 4 * 64
    assert plan(asked)["tokens_at_most"] == 10 * 1024 * by_group


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}])
def test_it_is_what_xla_says(experiment: Callable[..., Experiment], limits: dict[str, Any]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=8, **limits),
        data=PROMPTS,
        model=Small(layers=4, heads=4, head_dim=16, pattern=1),
        batch_size=64,
    )
    blueprint = build_blueprint(asked)
    leaves = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in blueprint.policy.variables.items()}
    sampler = Sampler(blueprint.policy, blueprint.config, blueprint.compute, stop_ids=())
    advance, seen = sampler._advance, list[Any]()

    def compiled(*args: Any, **options: Any) -> Any:
        if not seen:
            seen.append(advance.lower(*args, **options).compile().memory_analysis())
        return advance(*args, **options)

    sampler._advance = compiled
    prompts = [[10 + row // 8] * 16 for row in range(64)]
    sampler.complete(leaves, prompts, Sampling(48, temperature=1.0, top_p=limits.get("top_p")), limits=[1] * 64)
    weights = sum(leaf.nbytes for leaf in leaves.values())
    held = seen[0].argument_size_in_bytes - weights + seen[0].temp_size_in_bytes
    found = rollout_memory(blueprint, lengths(PROMPTS))
    assert found.cache + found.workspace == pytest.approx(held, rel=0.1)
    assert found.copies == sum(leaf.nbytes for path, leaf in leaves.items() if is_stacked(path))


def test_it_is_left_out_where_the_step_takes_more(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4), data=PROMPTS, model=Small()
    )
    assert "generation" not in {part.name for part in memory(build_blueprint(asked))}
