"""LongRoPE: what a file says of it, the length that decides, and where generation is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective, Optimizer, PlanError, Reward, Schedule, WeightsError
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.rope import LongRope
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.phi3 import PHI3
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.models.params import abstract

REFERENCE = Path(__file__).parent.parent / "reference" / "families" / "phi3_longrope"
SHORT = 24


def fields() -> dict[str, Any]:
    return json.loads((REFERENCE / "config.json").read_text())


@pytest.fixture(scope="module")
def reader() -> hf.HubReader:
    return hf.HubReader(REFERENCE)


@pytest.fixture(scope="module")
def leaves(reader: hf.HubReader) -> dict[str, jax.Array]:
    template = abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    return {path: jnp.asarray(reader.leaf(path)) for path in template.variables}


def logits(config: DecoderConfig, leaves: dict[str, jax.Array], tokens: Any, places: TokenPositions) -> np.ndarray:
    decoder: Any = abstract_decoder(config).merge(leaves)
    return np.asarray(decoder.logits(decoder(jnp.asarray(tokens), places, dtype=jnp.float32).hidden))


def with_scaling(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    rope = config.rope_global
    assert isinstance(rope.scaling, LongRope)
    return attrs.evolve(config, rope_global=attrs.evolve(rope, scaling=attrs.evolve(rope.scaling, **changes)))


@pytest.mark.extended
def test_each_ingredient_matters(reader: hf.HubReader, leaves: dict[str, jax.Array]) -> None:
    """Factors of the other length, or no attention factor, move logits by more than 1e-2 of the largest."""
    expected = np.load(REFERENCE / "expected.npz")
    tokens, lengths, wanted = (expected[name] for name in ("tokens", "lengths", "logits"))
    places, largest = positions_right_padded(jnp.asarray(lengths), tokens.shape[1]), np.abs(wanted).max()
    scaling = reader.config.rope_global.scaling
    assert isinstance(scaling, LongRope)
    for row, change in (
        (0, {"long_factor": scaling.short_factor}),
        (2, {"short_factor": scaling.long_factor}),
        (0, {"attention_factor": 1.0}),
        (2, {"attention_factor": 1.0}),
    ):
        n = lengths[row]
        right = logits(reader.config, leaves, tokens, places)[row, :n] - wanted[row, :n]
        wrong = logits(with_scaling(reader.config, **change), leaves, tokens, places)[row, :n] - wanted[row, :n]
        assert np.abs(right).max() == pytest.approx(0, abs=1e-5 * float(largest))
        assert np.abs(wrong).max() > 1e-2 * largest


@pytest.mark.extended
def test_a_sequence_is_as_long_as_its_longest_branch(reader: hf.HubReader, leaves: dict[str, jax.Array]) -> None:
    """A prompt of 20 tokens with answers of 3 and of 10: all of it has the positions of a long sequence."""
    tokens = np.random.default_rng(0).integers(0, 96, (1, 33))
    position = np.concatenate([np.arange(20), 20 + np.arange(3), 20 + np.arange(10)])[None]
    branch = np.repeat([0, 1, 2], [20, 3, 10])[None]
    places = TokenPositions(*(jnp.asarray(x, jnp.int32) for x in (position, np.ones_like(position), branch)))
    got = logits(reader.config, leaves, tokens, places)[0]
    always = with_scaling(reader.config, original_max_position_embeddings=2)
    for ours in (slice(20, 23), slice(23, 33)):
        whole = np.concatenate([tokens[:, :20], tokens[:, ours]], axis=1)
        alone = logits(always, leaves, whole, positions_right_padded(jnp.array([whole.shape[1]]), whole.shape[1]))[0]
        np.testing.assert_allclose(got[ours], alone[20:], atol=1e-5 * np.abs(alone).max(), rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("prompt", [pytest.param(8, marks=pytest.mark.slow), 30])
def test_generation_on_either_side_of_the_short_length(
    reader: hf.HubReader, leaves: dict[str, jax.Array], prompt: int
) -> None:
    """Greedy tokens by the cache are those of whole forward passes, which are compared with transformers elsewhere."""
    template = abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(prompt).integers(0, 96, prompt).tolist()
    sampler = Sampler(template, reader.config, jnp.float32, ())
    (answer,) = sampler(leaves, [tokens], Sampling(6, 0.0))
    for _ in range(6):
        places = positions_right_padded(jnp.array([len(tokens)]), len(tokens))
        tokens.append(int(logits(reader.config, leaves, [tokens], places)[0, -1].argmax()))
    assert answer == tokens[prompt:]


@pytest.mark.extended
def test_generation_across_the_short_length_is_refused(reader: hf.HubReader, leaves: dict[str, jax.Array]) -> None:
    template = abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    sampler = Sampler(template, reader.config, jnp.float32, ())
    with pytest.raises(ValueError, match="20 prompt tokens and 5 new ones pass 24 tokens, above which this model has"):
        sampler(leaves, [[1] * 20], Sampling(5, 0.0))
    assert len(sampler(leaves, [[1] * 20], Sampling(4, 0.0))[0]) == 4


def test_online_training_across_the_short_length_is_refused_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields() | {"vocab_size": 320}))

    def experiment(prompt: int, completion: int) -> Experiment:
        data = Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=prompt, max_completion_length=completion)
        return Experiment(
            name="long",
            model=Model.HF(str(tmp_path), weights=nnxdsl.Weights.Random()),
            objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=2),
            data=data,
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            steps=1,
            batch_size=2,
        )

    with pytest.raises(PlanError, match=r"data\.max_prompt_length: 16 prompt tokens and 9 new ones pass 24 tokens"):
        nnxdsl.plan(experiment(16, 9))
    nnxdsl.plan(experiment(16, 8))


def test_spellings() -> None:
    """The older spelling, its names of LongRoPE, and transformers' default of the attention factor."""
    saved = fields()
    entry = dict(saved["rope_parameters"])
    lists = {name: entry[name] for name in ("short_factor", "long_factor")}
    config = from_hf(saved)
    for name in ("longrope", "su", "yarn"):
        older = {**saved, "rope_parameters": None, "rope_theta": 500.0, "partial_rotary_factor": 0.75}
        assert from_hf({**older, "rope_scaling": {"type": name, **lists}}) == config
    assert isinstance(config.rope_global.scaling, LongRope)
    factor = math.sqrt(1 + math.log(saved["max_position_embeddings"] / SHORT) / math.log(SHORT))
    assert config.rope_global.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    assert from_hf(to_hf(config)) == config
    assert to_hf(config)["model_type"] == "phi3"
    # The field beside the entry decides, as in transformers; without it, transformers' default.
    moved = {**saved, "rope_parameters": {**entry, "original_max_position_embeddings": 7}}
    assert from_hf(moved) == config
    del moved["original_max_position_embeddings"]
    assert from_hf(moved).short_length == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long_factor": [1.0, 2.0]}, "long_factor: expected 3 numbers, got 2"),
        ({"long_factor": None}, "rope_parameters: long_factor: expected a list of numbers, got None"),
        ({"short_factor": [1.0, "x", 2.0]}, "rope_parameters: short_factor: expected a list of numbers"),
        ({"short_factor": [1.0, 0.0, 2.0]}, "rope_parameters: short_factor: expected numbers above 0"),
        ({"attention_factor": -1.0}, "rope_parameters: attention_factor: expected a number above 0, got -1.0"),
    ],
)
def test_wrong_entries_are_refused(change: dict[str, Any], message: str) -> None:
    saved = fields()
    with pytest.raises(WeightsError, match=message):
        from_hf({**saved, "rope_parameters": {**saved["rope_parameters"], **change}})


def test_other_families_refuse_it() -> None:
    saved = fields()
    llama = {**to_hf(from_hf(saved)), "model_type": "llama", "rope_parameters": saved["rope_parameters"]}
    with pytest.raises(WeightsError, match="'proportional' and 'yarn' are implemented, got 'longrope'"):
        from_hf(llama)


def test_phi_4_mini_as_published() -> None:
    scaling = PHI3["4-mini"].rope_global.scaling
    assert isinstance(scaling, LongRope)
    published = {
        "model_type": "phi3",
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": list(scaling.long_factor),
        },
        "sliding_window": 262_144,
        "tie_word_embeddings": True,
        "interpolate_factor": 1,
        "full_attn_mod": 1,
    }
    assert from_hf(published) == PHI3["4-mini"]
