"""Choices of the decoder that few families make, each against its formula in numpy's float64.

They are norms without scale of embeddings, queries and keys, an output gate with a projection of its own, another
epsilon of the norms after a mixer or a feed-forward, and another scale of the last norm.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.gqa import GQAConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.family import decoder

Arrays = dict[str, np.ndarray]
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
# One layer without rotary positions, with norms around its two halves whose epsilons are not small.
PLAIN = decoder(layers=1, embed=12, mlp=16, heads=4, kv_heads=2, head_dim=6, vocab=11, length=32, pattern=("nope",),
                rope=Rope(theta=100.0), norm_eps=0.1, tied_head=False,
                **{"norm.placement": "sandwich", "norm.scale": "zero_centred"})  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "embedding norm": {"embedding.norm": True},
    "norms of queries and keys": {"attention.query_key_norm": "unscaled"},
    "gate of its own": {"attention.output_gate": "own"},
    "epsilon of norms after": {"norm.post_eps": 3.0},
    "last norm": {"norm.final_scale": "wide"},
}


def arrays_of(config: DecoderConfig) -> Arrays:
    """A value for every array, none of which is 0 or 1; that of an array does not depend on the others."""
    template = abstract_decoder(config)
    return {
        path: np.random.default_rng(sum(path.encode())).standard_normal(leaf.shape).astype(np.float32) * 0.7
        for path, leaf in template.variables.items()
    }


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def wanted(config: DecoderConfig, arrays: Arrays) -> np.ndarray:
    """Hidden states `[T, D]` by the formulas."""
    fields = {path.removeprefix("layers.blocks.0."): leaf[0].astype(float) for path, leaf in arrays.items()}
    fields |= {path: arrays[path].astype(float) for path in ("embed.embedding", "norm.scale")}
    eps, after_eps = config.norm.eps, config.norm.post_eps or config.norm.eps

    def norm(name: str, x: np.ndarray, eps: float) -> np.ndarray:
        return rms(x, eps) * (1 + fields[f"{name}.scale"])

    def heads(name: str, x: np.ndarray) -> np.ndarray:
        return (x @ fields[f"attention.{name}.kernel"]).reshape(len(x), -1, config.head_dim)

    x = fields["embed.embedding"][TOKENS[0]]
    x = rms(x, eps) if config.embedding.norm else x
    normed = norm("pre_attention_norm", x, eps)
    query, key, value = (heads(name, normed) for name in ("query", "key", "value"))
    if config.attention.query_key_norm == "unscaled":
        query, key = rms(query, eps), rms(key, eps)
    key, value = (np.repeat(part, 2, axis=1) for part in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) * config.attention.query_scale
    scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), value).reshape(len(x), -1)
    if config.attention.output_gate == "own":
        mixed = mixed * sigmoid(normed @ fields["attention.output_gate.kernel"])
    x = x + norm("post_attention_norm", mixed @ fields["attention.output.kernel"], after_eps)
    normed = norm("pre_mlp_norm", x, eps)
    gate, up = (normed @ fields[f"mlp.{name}.kernel"] for name in ("gate", "up"))
    x = x + norm("post_mlp_norm", gate * sigmoid(gate) * up @ fields["mlp.down.kernel"], after_eps)
    return rms(x, eps) * (fields["norm.scale"] + (config.norm.final_scale is None))


def outputs(config: DecoderConfig, arrays: Arrays) -> np.ndarray:
    """Hidden states `[T, D]` of the decoder."""
    template = abstract_decoder(config)
    network = template.merge({path: jnp.asarray(leaf) for path, leaf in arrays.items()})
    assert isinstance(network, Decoder)
    places = positions_right_padded(jnp.asarray([TOKENS.size]), TOKENS.size)
    return np.asarray(network(jnp.asarray(TOKENS), places, dtype=jnp.float32).hidden[0])


@pytest.mark.default_variants(4)
@pytest.mark.parametrize("name", ["none", *CHOICES, "all"])
def test_a_choice_is_its_formula(name: str) -> None:
    every = {field: value for choice in CHOICES.values() for field, value in choice.items()}
    changes = {"none": {}, "all": every, **CHOICES}[name]
    config = PLAIN.with_fields(changes)
    arrays = arrays_of(config)
    hidden, formula = outputs(config, arrays), wanted(config, arrays)
    np.testing.assert_allclose(hidden, formula, rtol=0, atol=5e-6 * np.abs(formula).max())
    for field in changes:  # each of them counts
        other = config.with_fields({field: attrgetter(field)(PLAIN)})
        assert np.abs(hidden - wanted(other, arrays)).max() > 0.02, field


def test_where_a_gate_is_in_files() -> None:
    names = {
        choice: set(GQAConfig().tensors(PLAIN.with_fields({"attention.output_gate": choice})))
        for choice in ("none", "query", "own")
    }
    assert names["query"] == names["none"]
    assert names["own"] - names["none"] == {"attention.output_gate.kernel"}


def test_norms_without_scale_have_no_weights() -> None:
    assert arrays_of(PLAIN.with_fields({"attention.query_key_norm": "unscaled", "embedding.norm": True})).keys() == (
        arrays_of(PLAIN).keys()
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("attention.output_gate", r"attention.output_gate: expected one of \('none', 'query', 'own'\), got True"),
        ("attention.query_key_norm", "attention.query_key_norm: expected one of"),
        ("norm.final_scale", "norm.final_scale: expected one of"),
    ],
)
def test_other_values_are_refused(field: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLAIN.with_fields({field: True})
    with pytest.raises(ValueError, match=r"norm\.post_eps must be above 0, got 0"):
        PLAIN.with_fields({"norm.post_eps": 0.0})
