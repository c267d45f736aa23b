"""Gated DeltaNet against stored figures of transformers; rows of every layout against rows of one sequence each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.deltanet.layer import GatedDeltaNet, empty_state
from nnxdsl.models.deltanet.recurrence import Tokens, chunked_delta_rule, step
from nnxdsl.models.recurrent.order import Order
from nnxdsl.models.recurrent.rows import RecurrentState

FIGURES = Path(__file__).parent.parent / "reference/mixers"
WEIGHTS = {
    "inputs.kernel": "in_proj_qkvz.weight",
    "rates.kernel": "in_proj_ba.weight",
    "conv.weight": "conv1d.weight",
    "decay_log": "A_log",
    "decay_bias": "dt_bias",
    "norm.scale": "norm.weight",
    "output.kernel": "out_proj.weight",
}
Leaves = dict[str, jax.Array]


def view(places: TokenPositions, row: RowLayout | None) -> View:
    none = jnp.zeros((*places.positions.shape, 1))
    return View(AttentionMethod(row=row), places, None, (none, none))


class Layer(NamedTuple):
    config: GatedDeltaNetConfig
    template: params.AbstractModel
    leaves: Leaves
    figures: dict[str, np.ndarray]

    def __call__(
        self,
        leaves: Leaves,
        x: jax.Array,
        places: TokenPositions,
        row: RowLayout | None,
        past: RecurrentState | None = None,
    ) -> tuple[jax.Array, RecurrentState]:
        model: Any = self.template.merge(leaves)
        return model(x, view(places, row), past)


def ours(figures: dict[str, np.ndarray], prefix: str) -> Leaves:
    """Tensors of the Hub as our leaves: linear weights the other way round, all others as they are."""
    found = {path: figures[prefix + name] for path, name in WEIGHTS.items()}
    return {path: jnp.asarray(value.T if value.ndim == 2 else value) for path, value in found.items()}


def load(name: str, chunk: int = 16) -> Layer:
    figures = dict(np.load(FIGURES / f"{name}.npz"))
    sizes = {key.removeprefix("config."): int(value) for key, value in figures.items() if key.startswith("config.")}
    config = GatedDeltaNetConfig(conv_kernel=sizes.pop("conv"), **sizes)
    embed = figures["x"].shape[-1]

    def build() -> GatedDeltaNet:
        return GatedDeltaNet(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=chunk)

    return Layer(config, params.abstract(build), ours(figures, "weight."), figures)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return load("delta_grouped")


def relative(got: Any, wanted: Any, tolerance: float, least: float = 0.0) -> None:
    """The largest difference against the largest figure, or against one that is as large as figures are elsewhere."""
    scale = max(np.abs(wanted).max(), least)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(wanted) / scale, atol=tolerance, rtol=0)


def test_parameters_and_their_axes(layer: Layer) -> None:
    assert {path: (leaf.shape, leaf.axes) for path, leaf in layer.template.variables.items()} == {
        "conv.weight": ((2 * 16 + 24, 1, 4), ("conv", None, None)),
        "decay_bias": ((4,), ("heads",)),
        "decay_log": ((4,), ("heads",)),
        "inputs.kernel": ((20, 2 * 16 + 2 * 24), ("embed", "heads")),
        "norm.scale": ((6,), ("head_dim",)),
        "output.kernel": ((24, 20), ("heads", "embed")),
        "rates.kernel": ((20, 8), ("embed", "heads")),
    }
    state = jax.eval_shape(lambda: empty_state(layer.config, 3, jnp.bfloat16))
    assert (state.conv_state.shape, state.conv_state.dtype) == ((3, 56, 3), jnp.bfloat16)
    assert (state.memory.shape, state.memory.dtype) == ((3, 4, 8, 6), jnp.float32)
    for fields, problem in (
        ({"key_heads": 2, "value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
        ({"key_heads": 0, "value_heads": 3}, "key_heads must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=problem):
            GatedDeltaNetConfig(**fields, key_head_dim=4, value_head_dim=4)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("delta_grouped", 16),
        pytest.param("delta_grouped", 64, marks=pytest.mark.slow),
        pytest.param("delta_single", 64, marks=pytest.mark.slow),
    ],
)
def test_as_transformers_has_it(name: str, chunk: int) -> None:
    layer = load(name, chunk)
    x, c, lengths = (jnp.asarray(layer.figures[key]) for key in ("x", "c", "lengths"))
    rows_, length = x.shape[:2]
    whole, short = positions_right_padded(jnp.full((rows_,), length), length), positions_left_padded(lengths, length)

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[Any, ...]:
        def total(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, RecurrentState]]:
            out, state = layer(leaves, x, whole, rows.sequence(length))
            return jnp.sum(out * c), (out, state)

        (_, (out, state)), to = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(leaves, x)
        return out, state.memory, *to, layer(leaves, x, short, None)[0]

    out, memory, to_weights, to_x, padded = run(layer.leaves, x)
    relative(out, layer.figures["out"], 2e-6)
    # Both take differences of sums of decays, which reach 100 in a chunk of 64.
    relative(memory, layer.figures["memory"], 5e-5)
    relative(to_x, layer.figures["to_x"], 5e-6)
    for path, wanted in ours(layer.figures, "to.").items():
        relative(to_weights[path], wanted, 2e-5)  # sums over all tokens, some of which cancel
    real = np.asarray(short.segment_ids)[..., None] > 0
    assert not real.all()
    relative(np.where(real, padded, 0), layer.figures["padded"], 2e-6)
    assert np.isfinite(np.asarray(padded)).all()


Lengths = Sequence[tuple[int, int, int]]


class Laid(NamedTuple):
    """Slots of rows, and where each stands in a table of rows that hold one sequence each.

    Attributes:
        places: of the rows `[B, T]`.
        source: `[N, L]`, the slot (of all B T) that each slot of the table is filled from; 0 where `length` is over.
        length: `[N]` of the table's rows.
        at: `[B, T]`, where a slot's output stands in the table (of all N L).
        real: `[B, T]` bool.
    """

    places: TokenPositions
    source: np.ndarray
    length: np.ndarray
    at: np.ndarray
    real: np.ndarray


def laid_out(of_rows: Sequence[Lengths], size: int, most: int, *, pair: tuple[int, int] | None = None) -> Laid:
    """Pairs of (prompt, chosen, rejected) tokens one after another in each row, or one pair in parts of known slots."""
    places = np.zeros((3, len(of_rows), size), np.int32)
    source, length = np.zeros((most, size), np.int32), np.zeros(most, np.int32)
    at = np.zeros((len(of_rows), size), np.int32)
    number = 0
    for row, pairs in enumerate(of_rows):
        start = 0
        for segment, lengths in enumerate(pairs, 1):
            prompt: list[int] = []
            for branch, tokens in enumerate(lengths):
                first = start
                if pair is not None:
                    first = (pair[0] - tokens, pair[0], sum(pair))[branch]
                slots = list(range(first, first + tokens))
                start += tokens
                places[0, row, slots] = np.arange(tokens) + (lengths[0] if branch else 0)
                places[1, row, slots] = segment
                places[2, row, slots] = branch
                if branch == 0:
                    prompt = slots
                if branch or sum(lengths[1:]) == 0:
                    path = prompt + slots if branch else slots
                    source[number, : len(path)] = np.array(path, int) + row * size
                    length[number] = len(path)
                    at[row, path] = np.arange(len(path)) + number * size
                    number += 1
    return Laid(TokenPositions(*map(jnp.asarray, places)), source, length, at, places[1] > 0)


GRADIENTS = [False, pytest.param(True, marks=pytest.mark.slow)]  # which take several times as long to compile


def compared(layer: Layer, row: RowLayout | None, size: int, most: int, gradients: bool) -> Callable[[Laid, int], None]:
    """Compares a row's output, and gradients with respect to everything, with those of a row for each sequence."""

    @jax.jit
    def both(leaves: Leaves, x: jax.Array, c: jax.Array, laid: Laid) -> Any:
        def together(leaves: Leaves, x: jax.Array) -> jax.Array:
            return layer(leaves, x, laid.places, row)[0]

        def apart(leaves: Leaves, x: jax.Array) -> jax.Array:
            table = x.reshape(-1, x.shape[-1])[laid.source]  # [N, L, D]
            out = layer(leaves, table, positions_right_padded(laid.length, size), rows.sequence(size))[0]
            return out.reshape(-1, x.shape[-1])[laid.at]

        found = []
        for run in (together, apart):
            out, back = jax.vjp(run, leaves, x)
            to = back(c * laid.real[..., None]) if gradients else None
            found.append((jnp.where(laid.real[..., None], out, 0), to, jnp.isfinite(out)))
        return found

    def check(laid: Laid, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, c = (jnp.asarray(rng.normal(size=(*laid.real.shape, 20)), jnp.float32) for _ in range(2))
        (out, to, finite), (wanted, wanted_to, _) = both(layer.leaves, x, c, laid)
        assert bool(finite.all())
        relative(out, wanted, 1e-6)
        if not gradients:
            return
        relative(to[1], wanted_to[1], 1e-5)
        # Sums over all tokens, some of which cancel.
        jax.tree.map(lambda got, wanted: relative(got, wanted, 5e-5, 1.0), to[0], wanted_to[0])
        assert not np.asarray(to[1])[~laid.real].any()  # what stands in the padding is never read

    return check


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_prompt_of_a_pair_is_computed_once(layer: Layer, gradients: bool) -> None:
    prompt, response = 18, 17
    row = rows.pair(prompt, response)
    check = compared(layer, row.filled(row.size + 3), row.size + 3, 4, gradients)
    for number, of_rows in enumerate(
        ([[(18, 17, 17)], [(1, 16, 2)]], [[(17, 0, 17)], [(2, 1, 0)]], [[(9, 5, 16)], [(16, 3, 15)]])
    ):
        check(laid_out(of_rows, row.size + 3, 4, pair=(prompt, response)), number)


SLOTS = 40
sequences = st.tuples(st.integers(1, 18), st.integers(0, 18), st.integers(0, 18))
packed_rows = st.lists(sequences, min_size=1, max_size=4).map(
    lambda pairs: [pair for number, pair in enumerate(pairs) if sum(map(sum, pairs[: number + 1])) <= SLOTS]
)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_rows_of_pairs_side_by_side(layer: Layer, gradients: bool) -> None:
    """Branches that begin in a later chunk than their prompt ended, in the same one, at its end; padding at the end."""
    check = compared(layer, rows.packed(SLOTS), SLOTS, 16, gradients)
    check(laid_out([[(5, 16, 18)], [(16, 3, 5), (3, 2, 1), (1, 1, 1), (3, 0, 0), (2, 2, 0)]], SLOTS, 16), 0)
    check(laid_out([[(2, 1, 2), (1, 31, 3)], [(12, 4, 16), (8, 0, 0)]], SLOTS, 16), 1)

    @settings(max_examples=8, deadline=None)
    @given(st.tuples(packed_rows, packed_rows), st.integers(0, 9))
    def law(of_rows: Sequence[Lengths], seed: int) -> None:
        check(laid_out(of_rows, SLOTS, 16), seed)

    law()


@pytest.mark.slow
def test_where_nothing_is_known_of_the_row(layer: Layer) -> None:
    check = compared(layer, None, 34, 4, True)
    check(laid_out([[(9, 6, 11)], [(10, 12, 12)]], 34, 4), 0)
    check(laid_out([[(5, 6, 7)], [(12, 1, 10)]], 34, 4, pair=(12, 11)), 1)  # with padding before and between


@pytest.mark.slow
def test_token_by_token(layer: Layer) -> None:
    """Prompts padded on their left, then one token of each row at a time, then several, then a row that has ended."""
    x, lengths = jnp.asarray(layer.figures["x"][:, :12]), jnp.asarray([7, 2])

    def one(number: jax.Array) -> TokenPositions:
        return TokenPositions(*(jnp.full((2, 1), value, jnp.int32) for value in (number, 1, 0)))

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, ...]:
        out, state = layer(leaves, x[:, :7], positions_left_padded(lengths, 7), None)
        outs = [out]
        for number in range(7, 10):
            out, state = layer(leaves, x[:, number : number + 1], one(number), None, state)
            outs.append(out)
        several = TokenPositions(*(jnp.concatenate(part, axis=1) for part in zip(one(10), one(11), strict=True)))
        ended = several._replace(segment_ids=several.segment_ids.at[1].set(0))
        out, after = layer(leaves, x[:, 10:], several, None, state)
        _, stayed = layer(leaves, x[:, 10:], ended, None, state)
        _, still = layer(leaves, x[:, 11:], TokenPositions(*(part[:, :1] for part in ended)), None, state)
        whole, wanted = layer(leaves, x, positions_left_padded(lengths + 5, 12), rows.packed(12))
        kept = [(stayed.conv_state[1], state.conv_state[1]), (stayed.memory[1], state.memory[1])]
        kept += [(still.conv_state[1], state.conv_state[1]), (still.memory[1], state.memory[1])]
        return jnp.concatenate([*outs, out], axis=1), whole, after, wanted, kept

    out, whole, after, wanted, kept = run(layer.leaves, x)
    real = np.asarray(positions_left_padded(lengths + 5, 12).segment_ids)[..., None] > 0
    relative(np.where(real, out, 0), np.where(real, whole, 0), 1e-6)
    relative(after.conv_state, wanted.conv_state, 1e-6)
    relative(after.memory, wanted.memory, 1e-6)
    assert all(bool((mine == before).all()) for mine, before in kept)


def one_by_one(tokens: Tokens, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        out, memory = step(jax.tree.map(lambda part: part[:, None], token), jnp.ones(len(memory), bool), memory)
        return memory, out[:, 0]

    memory, out = jax.lax.scan(one, memory, jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1), memory


def test_memories_that_keep_all_or_nothing() -> None:
    """One key for all tokens, corrected in full: the inverse's powers would overflow; decays whose products vanish."""
    rng = np.random.default_rng(0)
    order = Order(jnp.ones((1, 64), jnp.int32), None)

    @jax.jit
    def both(tokens: Tokens, memory: jax.Array) -> Any:
        found = []
        for run in (lambda *given: chunked_delta_rule(given[0], order, given[1]), one_by_one):
            out, back = jax.vjp(run, tokens, memory)
            found.append((out, back(jax.tree.map(jnp.ones_like, out))))
        return found

    for decay, alike in ((0.0, True), (-200.0, False), (-0.01, True)):
        query, key = (jnp.asarray(rng.normal(size=(1, 64, 1, 4)), jnp.float32) for _ in range(2))
        if alike:
            key = jnp.broadcast_to(key[:, :1], key.shape)
        value = jnp.asarray(rng.normal(size=(1, 64, 1, 1, 3)), jnp.float32)
        tokens = Tokens(query, key, value, jnp.full((1, 64, 1, 1), decay), jnp.ones((1, 64, 1, 1)))
        mine, wanted = both(tokens, jnp.asarray(rng.normal(size=(1, 1, 1, 4, 3)), jnp.float32))
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5), mine, wanted)


def test_the_backward_pass_keeps_what_the_linear_layers_gave(layer: Layer) -> None:
    """And nothing of what the convolution and the rule make of it, which is many times as large."""
    length = 1024
    row, places = rows.pair(512, 256), positions_right_padded(jnp.full((1,), length), length)
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in layer.template.variables.items()}
    kept: list[jax.ShapeDtypeStruct] = []

    def trace(leaves: Leaves, x: jax.Array) -> None:
        _, back = jax.vjp(lambda leaves, x: layer(leaves, x, places, row)[0], leaves, x)
        kept.extend(jax.tree.leaves(back))

    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct((1, length, 20), jnp.float32))
    # x; inputs and rates; of the norm and the gate after the rule some arrays of the width of the values.
    widths = 20 + (80 + 8) + 12 * 24
    assert sum(leaf.size for leaf in kept) < length * widths + 50_000


@pytest.mark.slow
def test_half_precision(layer: Layer) -> None:
    x = jnp.asarray(layer.figures["x"], jnp.bfloat16)
    places, row = positions_right_padded(jnp.full((2,), x.shape[1]), x.shape[1]), rows.sequence(x.shape[1])
    out, state = jax.jit(lambda leaves, x: layer(leaves, x, places, row))(layer.leaves, x)
    assert (out.dtype, state.conv_state.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    relative(out.astype(jnp.float32), layer.figures["out"], 0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning")
def test_adapters_and_few_bits_from_outside() -> None:
    """On every linear layer and nothing else; with B zero the adapters change nothing."""
    names = ("inputs", "rates", "output")
    rule = {"module_path": "|".join(names), "weight_qtype": "nf4", "tile_size": 16}
    given = jnp.ones((1, 5, 32)), view(positions_right_padded(jnp.array([5]), 5), None), None

    def plain() -> GatedDeltaNet:
        config = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=8)
        return GatedDeltaNet(32, config, norm_eps=1e-6, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    def tuned() -> Any:
        provider = qwix.LoraProvider([qwix.LoraRule(**rule, rank=2, alpha=2.0)])
        return qwix.apply_lora_to_model(plain(), provider, *given, rngs=nnx.Rngs(1))

    def base() -> Any:
        return qwix.quantize_model(plain(), qwix.PtqProvider([qwix.QuantizationRule(**rule)]), *given)

    policy, frozen = params.abstract(tuned), params.abstract(base)
    found = [re.fullmatch(r"(\w+)\.kernel_lora_[ab]", path) for path in policy.variables]
    assert {match[1] for match in found if match} == set(names)
    assert sum(path.endswith("qvalue") for path in policy.variables) == len(names)

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        leaves = params.flatten(base())
        adapters = {
            path: jnp.full(leaf.shape, float(path.endswith("_a")), leaf.dtype)
            for path, leaf in policy.variables.items()
            if "_lora_" in path
        }
        one: Any = policy.merge(leaves | adapters)
        other: Any = frozen.merge(leaves)
        return one(x, *given[1:])[0], other(x, *given[1:])[0]

    mine, wanted = run(jax.random.normal(jax.random.key(0), (1, 5, 32)))
    assert float(jnp.abs(wanted).max()) > 0.1
    np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)


def test_separate_projections_are_the_joined_ones_in_another_order(layer: Layer) -> None:
    config = attrs.evolve(layer.config, projections="separate")
    keys, width, values = config.key_heads, config.key_head_dim, config.values_per_key * config.value_head_dim
    embed = layer.figures["x"].shape[-1]
    template = params.abstract(
        lambda: GatedDeltaNet(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=16)
    )
    leaves = dict(layer.leaves)
    joined = leaves.pop("inputs.kernel").reshape(embed, keys, -1)  # each key head's query, key, values, gates
    *parts, gate = jnp.split(joined, np.cumsum([width, width, values]), axis=-1)
    rate, decay = jnp.split(leaves.pop("rates.kernel").reshape(embed, keys, -1), 2, axis=-1)
    leaves["inputs.kernel"] = jnp.concatenate([part.reshape(embed, -1) for part in parts], axis=-1)
    for name, part in (("output_gate", gate), ("rate", rate), ("decay", decay)):
        leaves[f"{name}.kernel"] = part.reshape(embed, -1)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: leaf.shape for path, leaf in template.variables.items()
    }
    x = jnp.asarray(layer.figures["x"])
    whole = positions_right_padded(jnp.full((len(x),), x.shape[1]), x.shape[1])
    separate = Layer(config, template, leaves, layer.figures)
    relative(jax.jit(lambda leaves, x: separate(leaves, x, whole, None)[0])(leaves, x), layer.figures["out"], 2e-6)
