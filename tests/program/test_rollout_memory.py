"""What a plan says of completions: the bytes that the sampler holds, where these are more than the step takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from small_lab.model import Long, Small

from nnxdsl import (
    Data,
    Engine,
    Environment,
    Experiment,
    Memory,
    Mesh,
    Model,
    Objective,
    PlanError,
    Reward,
    Tokenizer,
    Weights,
    WeightsError,
    evolve,
    load,
    to_json,
)
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.params import is_stacked
from nnxdsl.planning.plan import plan
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import memory, reward_memory, rollout_memory

FAMILIES = Path(__file__).parent.parent / "reference" / "families"
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
    actual = rollout_memory(blueprint, longest)
    assert (actual.rows, actual.tokens) == (64 // mesh.fsdp, 64)
    keys = 4 * 2 * 2 * 16  # layers, key and value, heads of them, their width
    # 64 completions of 48 tokens, twice the 16 prefixes of 16 tokens that they have at first, 16 prompts at one time
    tokens = (64 * 48 + 2 * 16 * 16 + 16 * 16) // mesh.fsdp
    assert tokens * keys * 4 <= actual.cache < 1.1 * tokens * keys * 4
    parts = {part.name: part.bytes for part in memory(blueprint)}
    step = sum(parts[name] for name in ("gradients", "activations", "workspace"))
    assert parts.get("generation", 0) == max(actual.total - step, 0)
    by_group = 16 + 4 * 48 if mesh.fsdp == 1 else 4 * 64
    assert plan(asked)["tokens_at_most"] == 10 * 1024 * by_group


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, 16),
        ({"environment": Environment("asks again", max_turns=3)}, 64),
        ({"top_p": 0.9}, 16),
        ({"kv_cache_dtype": "int8"}, 16),
    ],
    ids=["one turn", "a later turn of an environment", "top_p", "8 bits"],
)
def test_it_is_what_xla_says(experiment: Callable[..., Experiment], fields: dict[str, Any], prompt: int) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=8, **fields),
        data=PROMPTS,
        model=Long(layers=4, heads=4, head_dim=16, pattern=1),
        batch_size=64,
    )
    blueprint = build_blueprint(asked)
    leaves = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in blueprint.policy.variables.items()}
    of_kv = {"kv_cache_dtype": fields.get("kv_cache_dtype")}
    sampler = Sampler(blueprint.policy, blueprint.config, blueprint.compute, stop_ids=(), **of_kv)
    advance, seen = sampler._advance, list[Any]()

    def compiled(*args: Any, **options: Any) -> Any:
        if not seen:
            seen.append(advance.lower(*args, **options).compile().memory_analysis())
        return advance(*args, **options)

    sampler._advance = compiled
    prompts = [[10 + row // 8] * prompt for row in range(64)]
    sampler.complete(leaves, prompts, Sampling(48, temperature=1.0, top_p=fields.get("top_p")), limits=[1] * 64)
    weights = sum(leaf.nbytes for leaf in leaves.values())
    held = seen[0].argument_size_in_bytes - weights + seen[0].temp_size_in_bytes
    actual = rollout_memory(blueprint, lengths(PROMPTS))
    assert actual.cache + actual.workspace == pytest.approx(held, rel=0.1)
    if "kv_cache_dtype" in fields:
        floats = rollout_memory(build_blueprint(evolve(asked, {"objective.kv_cache_dtype": None})), lengths(PROMPTS))
        numbers = 16  # of a head, beside one scale
        assert actual.cache == pytest.approx(floats.cache * (numbers + 4) / (4 * numbers), rel=0.05)
    assert actual.copies == sum(leaf.nbytes for path, leaf in leaves.items() if is_stacked(path))


def test_a_dtype_of_keys_needs_keys(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    fields = json.loads((FAMILIES / "qwen3_next" / "config.json").read_text())
    fields["layer_types"] = ["linear_attention"] * fields["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4, kv_cache_dtype="int8"),
        data=PROMPTS,
        model=Model.HF(str(tmp_path), weights=Weights.Random()),
    )
    message = "the model has no keys and values, and states of linear layers stay as they are; set None"
    with pytest.raises(PlanError, match=f"objective.kv_cache_dtype: {message}"):
        build_blueprint(asked)
    blueprint = build_blueprint(evolve(asked, {"objective.kv_cache_dtype": None}))
    with pytest.raises(ValueError, match=f"^kv_cache_dtype: {message}"):
        Sampler(blueprint.policy, blueprint.config, blueprint.compute, (), kv_cache_dtype="int8")
    shutil.copy(FAMILIES / "qwen3_next" / "model.safetensors", tmp_path)
    with pytest.raises(WeightsError, match=f"kv_cache_dtype: {message}"):
        load(tmp_path, kv_cache_dtype="int8")


def test_it_is_left_out_where_the_step_takes_more(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4), data=PROMPTS, model=Small()
    )
    assert "generation" not in {part.name for part in memory(build_blueprint(asked))}


def test_it_is_left_out_where_a_server_samples(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=4),
        data=ROOM,
        model=Long(layers=8, heads=4, head_dim=32, pattern=1, vocab_size=16),
        batch_size=64,
        microbatch_size=1,
        memory=Memory(remat="full"),
    )
    assert "generation" in {part.name for part in memory(build_blueprint(asked))}
    served = attrs.evolve(asked, objective=attrs.evolve(asked.objective, engine=Engine.Server("http://localhost:8000")))
    assert "generation" not in {part.name for part in memory(build_blueprint(served))}


ROOM = Data.Prompts("none.jsonl", max_prompt_length=128, max_completion_length=128)
PAIRS = Data.Preferences("none.jsonl", max_prompt_length=128, max_completion_length=128)


@pytest.fixture
def rated(experiment: Callable[..., Experiment]) -> Experiment:
    """An experiment that trains a reward model larger than the policy."""
    model = Long(layers=6, heads=4, head_dim=16, embed_dim=64, mlp_dim=128, pattern=1, vocab_size=320)
    memory = Memory(remat="full")
    return experiment(objective=Objective.Reward(), data=PAIRS, model=model, batch_size=4, memory=memory)


def online(experiment: Callable[..., Experiment], *weights: Weights, **fields: Any) -> Experiment:
    """GRPO whose rewards are those of reward models."""
    models = [Reward.Model(one, name=f"model {index}", **fields) for index, one in enumerate(weights)]
    objective, memory = Objective.GRPO(rewards=tuple(models), num_generations=4), Memory(remat="full")
    return experiment(objective=objective, data=ROOM, model=Long(), batch_size=4, microbatch_size=4, memory=memory)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("shape", [{}, {"mlp_dim": 4096}], ids=["attention is larger", "the MLP is larger"])
def test_a_reward_model_is_what_xla_says(
    experiment: Callable[..., Experiment], rated: Experiment, shape: dict[str, int]
) -> None:
    rated = attrs.evolve(rated, model=attrs.evolve(rated.model, **shape))
    template = build_blueprint(rated).base_template
    leaves = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}
    config = build_blueprint(rated).config
    model = Pretrained(template, config, leaves, jnp.float32, Path(), Tokenizer.Bytes(), None, None)
    computed, seen = model._rewards, list[Any]()

    def compiled(*args: Any) -> jax.Array:
        seen.append(computed.lower(*args).compile().memory_analysis())
        return computed(*args)

    model._rewards = compiled
    model.rewards(["p" * 128] * 8, ["c" * 120] * 8, batch_size=8)
    ((actual,), _) = reward_memory(build_blueprint(online(experiment, Weights.From(rated), batch_size=8)))
    assert actual.weights == sum(leaf.nbytes for leaf in leaves.values())
    assert actual.workspace == pytest.approx(seen[0].temp_size_in_bytes, rel=0.15)


def test_reward_models_are_in_the_plan(
    experiment: Callable[..., Experiment], rated: Experiment, tmp_path: Path
) -> None:
    """Two of them, of an experiment and of its run; what they compute with counts where the step needs less."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "experiment.json").write_text(to_json(rated))
    asked = online(experiment, Weights.From(rated), Weights.Checkpoint(str(run)), batch_size=64)
    blueprint = build_blueprint(asked)
    (first, second), _ = reward_memory(blueprint)
    assert first == second
    parts = {part.name: part for part in memory(blueprint)}
    assert (parts["reward models"].bytes, parts["reward models"].tag) == (2 * first.weights, "exact")
    free = sum(parts[name].bytes for name in ("gradients", "activations", "workspace", "generation") if name in parts)
    assert parts["rewards"].bytes == first.workspace - free > 0
    without = plan(attrs.evolve(asked, objective=attrs.evolve(asked.objective, rewards=(Reward("exact_answer"),))))
    more = 2 * first.weights + first.workspace - free
    assert plan(asked)["bytes_per_device"] == without["bytes_per_device"] + more
    ((half,), _) = reward_memory(build_blueprint(online(experiment, Weights.From(rated), dtype="bfloat16")))
    assert half.weights == first.weights // 2
    absent = plan(online(experiment, Weights.HF("not/there/at/all")))
    (warning,) = (one for one in absent["warnings"] if one["kind"] == "memory")
    assert warning["path"] == "objective.rewards.0.weights"
    assert warning["message"].startswith("not counted: not/there/at/all: no such directory")
    assert "reward models" not in {part["name"] for part in absent["memory"]}
