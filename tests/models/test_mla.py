"""Multi-head latent attention against stored figures of transformers; its layouts, its cache, and adapters on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.kv_cache import KV, concat_positions
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.mla import LatentAttention
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.mla import MLAConfig
from tests.models.qwix_mixers import check_from_outside

FIGURES = Path(__file__).parent.parent / "reference/mixers"
WEIGHTS = {
    "query.kernel": "q_proj.weight",
    "query_down.kernel": "q_a_proj.weight",
    "query_norm.scale": "q_a_layernorm.weight",
    "query_up.kernel": "q_b_proj.weight",
    "key_value_down.kernel": "kv_a_proj_with_mqa.weight",
    "key_value_norm.scale": "kv_a_layernorm.weight",
    "key_value_up.kernel": "kv_b_proj.weight",
    "output.kernel": "o_proj.weight",
}
Leaves = dict[str, jax.Array]


class Layer(NamedTuple):
    config: MLAConfig
    template: params.AbstractModel
    leaves: Leaves
    figures: dict[str, np.ndarray]

    def __call__(
        self,
        leaves: Leaves,
        x: jax.Array,
        places: TokenPositions,
        row: RowLayout | None = None,
        past: tuple[KV, TokenPositions] | None = None,
    ) -> tuple[jax.Array, KV]:
        """With a row in blocks of five queries, else with a mask of all slots."""
        model: Any = self.template.merge(leaves)
        keys = places if past is None else concat_positions(past[1], places)
        rope = tuple(jnp.asarray(self.figures[name])[places.positions] for name in ("sin", "cos"))
        method = AttentionMethod() if row is None else AttentionMethod("chunked", row, queries=5)
        view = View(method, places, attention_mask(places, keys) if row is None else None, (rope[0], rope[1]))
        return model(x, view, None if past is None else past[0])


def ours(figures: dict[str, np.ndarray], prefix: str) -> Leaves:
    """Tensors of the Hub as our leaves: linear weights the other way round, all others as they are."""
    result = {path: figures[prefix + name] for path, name in WEIGHTS.items() if prefix + name in figures}
    return {path: jnp.asarray(value.T) for path, value in result.items()}


def load(name: str) -> Layer:
    figures = dict(np.load(FIGURES / f"{name}.npz"))
    sizes: dict[str, Any] = {
        key.removeprefix("config."): value.item() for key, value in figures.items() if key.startswith("config.")
    }
    heads, embed = sizes.pop("num_heads"), figures["x"].shape[-1]
    if sizes["q_lora_rank"] < 0:
        sizes["q_lora_rank"] = None
    config, scale = MLAConfig(**sizes), float(figures["scale"])

    def build() -> LatentAttention:
        return LatentAttention(
            embed, heads, config, query_scale=scale, rngs=nnx.Rngs(0), param_dtype=jnp.float32
        )  # fmt: skip

    return Layer(config, params.abstract(build), ours(figures, "weight."), figures)


@pytest.fixture(scope="module", params=["latent_compressed", pytest.param("latent_direct", marks=pytest.mark.slow)])
def layer(request: pytest.FixtureRequest) -> Layer:
    return load(request.param)


def relative(got: Any, wanted: Any, tolerance: float, least: float = 0.0) -> None:
    """The largest difference against the largest figure, or against one that is as large as figures are elsewhere."""
    scale = max(np.abs(wanted).max(), least)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(wanted) / scale, atol=tolerance, rtol=0)


def test_parameters_and_their_axes(layer: Layer) -> None:
    query = {"query.kernel": ((20, 42), ("embed", "heads"))}
    if layer.config.q_lora_rank is not None:
        query = {
            "query_down.kernel": ((20, 12), ("embed", "latent")),
            "query_norm.scale": ((12,), ("norm",)),
            "query_up.kernel": ((12, 42), ("latent", "heads")),
        }
    assert {path: (leaf.shape, leaf.axes) for path, leaf in layer.template.variables.items()} == query | {
        "key_value_down.kernel": ((20, 16), ("embed", "latent")),
        "key_value_norm.scale": ((10,), ("norm",)),
        "key_value_up.kernel": ((10, 39), ("latent", "heads")),
        "output.kernel": ((15, 20), ("heads", "embed")),
    }


def test_widths_that_cannot_be() -> None:
    sizes = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    for fields, problem in (
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim=3 is odd"),
        ({"q_lora_rank": 0}, "q_lora_rank must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=problem):
            MLAConfig(**sizes | fields)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("latent_compressed", True),
        ("latent_direct", False),
        pytest.param("latent_compressed", False, marks=pytest.mark.slow),
        pytest.param("latent_direct", True, marks=pytest.mark.slow),
    ],
)
def test_as_transformers_has_it(name: str, blocks: bool) -> None:
    layer = load(name)
    x, c = (jnp.asarray(layer.figures[key]) for key in ("x", "c"))
    length = x.shape[1]
    places, row = positions_right_padded(jnp.full((2,), length), length), rows.sequence(length) if blocks else None

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, Any]:
        out, back = jax.vjp(lambda leaves, x: layer(leaves, x, places, row)[0], leaves, x)
        return out, back(c)

    out, (to_weights, to_x) = run(layer.leaves, x)
    relative(out, layer.figures["out"], 2e-6)
    relative(to_x, layer.figures["to_x"], 5e-6)
    wanted = ours(layer.figures, "to.")
    assert wanted.keys() == to_weights.keys()
    for path, value in wanted.items():
        relative(to_weights[path], value, 5e-6)


PROMPT, RESPONSE = 9, 6
lengths = st.tuples(st.integers(1, PROMPT), st.integers(0, RESPONSE), st.integers(0, RESPONSE))


@pytest.mark.extended
def test_the_prompt_of_a_pair_is_computed_once(layer: Layer) -> None:
    row, size = rows.pair(PROMPT, RESPONSE), PROMPT + RESPONSE

    @jax.jit
    def both(leaves: Leaves, x: jax.Array, c: jax.Array, places: TokenPositions, start: jax.Array) -> Any:
        """The row of a pair, as a mask and in blocks; and each completion in a row of its own, after its prompt."""
        alone = positions_left_padded(start + RESPONSE, size)  # [2]: both completions filled up

        def apart(leaves: Leaves, x: jax.Array) -> jax.Array:
            chosen, rejected = x[:, :size], jnp.concatenate([x[:, :PROMPT], x[:, size:]], axis=1)
            out = layer(leaves, jnp.concatenate([chosen, rejected]), alone)[0]
            return jnp.concatenate([out[:1], out[1:, PROMPT:]], axis=1)

        actual = []
        for run in (
            apart,
            lambda leaves, x: layer(leaves, x, places)[0],
            lambda leaves, x: layer(leaves, x, places, row)[0],
        ):
            real = (places.segment_ids > 0)[..., None]
            out, back = jax.vjp(run, leaves, x)
            actual.append((jnp.where(real, out, 0), back(jnp.where(real, c, 0))))
        return actual

    @settings(max_examples=4, deadline=None)
    @given(lengths, st.integers(0, 9))
    def law(tokens: tuple[int, int, int], seed: int) -> None:
        prompt, *responses = tokens
        place = np.zeros((3, 1, row.size), np.int32)
        place[0, 0, PROMPT - prompt : PROMPT], place[1, 0, PROMPT - prompt : PROMPT] = np.arange(prompt), 1
        for branch, response in enumerate(responses, 1):
            slots = slice(PROMPT + (branch - 1) * RESPONSE, PROMPT + (branch - 1) * RESPONSE + response)
            place[0, 0, slots], place[1, 0, slots] = prompt + np.arange(response), 1
            place[2, 0, PROMPT + (branch - 1) * RESPONSE : PROMPT + branch * RESPONSE] = branch
        rng = np.random.default_rng(seed)
        x, c = (jnp.asarray(rng.normal(size=(1, row.size, 20)), jnp.float32) for _ in range(2))
        places = TokenPositions(*map(jnp.asarray, place))
        (out, to), *others = both(layer.leaves, x, c, places, jnp.full((2,), prompt))
        for mine, to_mine in others:
            relative(mine, out, 1e-6)
            jax.tree.map(lambda got, wanted: relative(got, wanted, 1e-5, 1.0), to_mine, to)

    law()


def test_token_by_token(layer: Layer) -> None:
    """Padded prompts fill a cache that has room; then several tokens at once, then one at a time."""
    x, lengths, room = jnp.asarray(layer.figures["x"][:, :11]), jnp.asarray([7, 2]), 12

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole, kept = layer(leaves, x, positions_left_padded(lengths + 4, 11))
        assert (kept.key.shape, kept.value.shape) == ((2, 3, 11, 14), (2, 3, 11, 5))
        out, new = layer(leaves, x[:, :7], positions_left_padded(lengths, 7))
        held = KV(*(jnp.zeros((*part.shape[:2], room, part.shape[3])).at[:, :, :7].set(part) for part in new))
        seen = TokenPositions(
            *(jnp.zeros((2, room), jnp.int32).at[:, :7].set(part) for part in positions_left_padded(lengths, 7))
        )
        outs = [out]
        for start, stop in ((7, 9), (9, 10), (10, 11)):
            position = lengths[:, None] + jnp.arange(start - 7, stop - 7)
            places = TokenPositions(position, jnp.ones_like(position), jnp.zeros_like(position))
            out, new = layer(leaves, x[:, start:stop], places, past=(held, seen))
            held = KV(*(old.at[:, :, start:stop].set(part) for old, part in zip(held, new, strict=True)))
            seen = TokenPositions(*(old.at[:, start:stop].set(part) for old, part in zip(seen, places, strict=True)))
            outs.append(out)
        return jnp.concatenate(outs, axis=1), whole

    real = np.asarray(positions_left_padded(lengths + 4, 11).segment_ids)[..., None] > 0
    out, whole = (np.where(real, part, 0) for part in run(layer.leaves, x))
    relative(out, whole, 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning")
def test_adapters_and_few_bits_from_outside() -> None:
    """On every linear layer and nothing else; with B zero the adapters change nothing."""
    names = ("query_down", "query_up", "key_value_down", "key_value_up", "output")
    places = positions_right_padded(jnp.array([5]), 5)
    view = View(AttentionMethod(), places, attention_mask(places, places), (jnp.zeros((1, 5, 4)), jnp.ones((1, 5, 4))))

    def plain() -> LatentAttention:
        config = MLAConfig(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
        return LatentAttention(32, 4, config, query_scale=0.25, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    check_from_outside(plain, names, view)
