"""Slots change no draw: whoever has them, in whatever order; and log-probabilities are those of the whole forward."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.formats import hf
from nnxdsl.generate import sampler as module
from nnxdsl.generate.row_queue import NewRow
from nnxdsl.generate.sampler import Completion, Sampler
from nnxdsl.generate.sampling import Sampling, filter_logits
from nnxdsl.models import params
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.gemma4 import GEMMA4
from nnxdsl.models.families.gpt_oss import GPT_OSS
from nnxdsl.models.families.qwen3_next import QWEN3_NEXT

NEW = 12
CONFIGS = {
    "sliding windows": attrs.evolve(GEMMA3["tiny"], window=6),
    "recurrent layers and experts": QWEN3_NEXT["tiny"],
    "latent attention": DEEPSEEK_V3["tiny"],
    "a selection that layers share": hf.read_config(
        Path(__file__).parent.parent / "reference" / "families" / "glm_moe_dsa_shared"
    ).with_fields(
        {
            "layers.num_layers": 6,
            "vocab_size": 300,
            **dict.fromkeys(("layers.lead_pattern", "layers.pattern"), ("global", "shared_index")),
        }
    ),
    "shared keys and values": GEMMA4["tiny-e"],
    "sinks": GPT_OSS["tiny"],
}
HOT = Sampling(NEW, temperature=1.3, seed=7)
Built = tuple[params.AbstractModel, DecoderConfig, dict[str, jax.Array]]


def groups() -> list[list[int]]:
    """Three prompts of other lengths, with 3, 2 and 2 answers."""
    draw = np.random.default_rng(3)
    result = [draw.integers(8, 200, size).tolist() for size in (5, 19, 9)]
    return [result[0]] * 3 + [result[1]] * 2 + [result[2]] * 2


def build_model(name: str) -> Built:
    config = CONFIGS[name]
    template = abstract_decoder(config)
    # Token vectors are small, or each would only say itself.
    draw, spread = np.random.default_rng(0), {"embedding": 0.03}
    leaves = {
        path: jnp.asarray(draw.normal(size=leaf.shape) * spread.get(path.rpartition(".")[2], 0.2), leaf.dtype)
        for path, leaf in template.variables.items()
    }
    return template, config, leaves


@pytest.fixture(scope="module")
def build() -> Callable[[str], Built]:
    return cache(build_model)


def ids(result: list[Completion]) -> list[list[int]]:
    return [one.ids for one in result]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sliding windows", None), ("recurrent layers and experts", None), ("sliding windows", "int8")],
)
def test_draws_depend_neither_on_slots_nor_on_neighbours_nor_on_order(
    build: Callable[[str], Built], name: str, dtype: KVCacheDtype | None
) -> None:
    template, config, leaves = build(name)
    make = partial(Sampler, template, config, jnp.float32, kv_cache_dtype=dtype)
    prompts = groups()
    stops = range(0, config.vocab_size, 12)  # completions have other lengths
    wanted = ids(make(stops, slots=16).complete(leaves, prompts, HOT))
    assert len({len(one) for one in wanted}) > 2
    assert len({tuple(one) for one in wanted}) == len(prompts)  # answers of one prompt differ
    small = make(stops, slots=2)
    assert ids(small.complete(leaves, prompts, HOT)) == wanted
    assert ids(small.complete(leaves, prompts[::-1], HOT))[::-1] == [*wanted[2::-1], *wanted[4:2:-1], *wanted[:4:-1]]
    assert ids(small.complete(leaves, prompts[2:5], HOT))[1:] == wanted[3:5]
    limits = [1, 5, NEW, 2, NEW, 3, 4]
    assert ids(small.complete(leaves, prompts, HOT, limits=limits)) == [
        one[:limit] for one, limit in zip(wanted, limits, strict=True)
    ]
    pieces = list(small.stream(leaves, prompts, HOT, every=3))
    assert [list(itertools.chain(*parts)) for parts in zip(*pieces, strict=True)] == wanted


@pytest.mark.default_variants(2)
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    # Of rounded states, indexers select other tokens, and routers other experts.
    [
        (name, dtype, bound)
        for name in CONFIGS
        for dtype, bound in ((None, 1e-4), ("int8", 0.2 if "selection" in name else 0.05))
    ],
)
def test_log_probs_are_those_of_the_whole_forward(
    build: Callable[[str], Built], name: str, dtype: KVCacheDtype | None, bound: float
) -> None:
    template, config, leaves = build(name)
    sampling = attrs.evolve(HOT, top_k=40, top_p=0.9, min_p=0.02)
    prompts, sampler = groups(), Sampler(template, config, jnp.float32, (), slots=3, kv_cache_dtype=dtype)
    actual = sampler.complete(leaves, prompts, sampling)
    size = 19 + NEW
    rows = np.zeros((len(prompts), size), np.int32)
    for row, prompt, one in zip(rows, prompts, actual, strict=True):
        row[: len(prompt) + NEW] = [*prompt, *one.ids]
    places = positions_right_padded(jnp.array([len(prompt) + NEW for prompt in prompts]), size)

    @jax.jit
    def forward(leaves: Any) -> tuple[jax.Array, jax.Array]:
        model: Any = template.merge(leaves)
        logits = model.logits(model(rows, places, dtype=jnp.float32).hidden) / HOT.temperature
        top = filter_logits(logits, 40, jnp.float32(0.9), jnp.float32(0.02))
        total = jax.nn.logsumexp(logits, axis=-1)
        return logits - total[..., None], jax.nn.logsumexp(top, axis=-1) - total

    logps, mass = map(np.asarray, forward(leaves))
    for row, (prompt, one) in enumerate(zip(prompts, actual, strict=True)):
        index = np.arange(len(prompt) - 1, len(prompt) - 1 + NEW)
        np.testing.assert_allclose(one.logps, logps[row, index, one.ids], atol=bound, rtol=0)
        if dtype is None:  # rounding moves tokens across the bounds of top-p and min-p
            np.testing.assert_allclose(one.log_mass, mass[row, index], atol=bound, rtol=0)
        else:
            assert np.abs(one.logps - logps[row, index, one.ids]).max() > 1e-4
        assert (one.log_mass < 0).any()
        assert (one.logps <= one.log_mass + 1e-6).all()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sliding windows", "recurrent layers and experts", "shared keys and values"])
def test_rows_that_join_later_have_the_same_draws(build: Callable[[str], Built], name: str) -> None:
    template, config, leaves = build(name)
    stops = range(0, config.vocab_size, 12)
    prompts = [prompt for number in range(3) for prompt in groups()[number::3]]  # equal ones are apart
    numbers = [np.array([number, 5], np.uint32) for number in range(len(prompts))]
    whole = Sampler(template, config, jnp.float32, stops, slots=16)
    wanted = {number: list[int]() for number in range(len(prompts))}
    for pieces in whole.pieces(leaves, prompts, HOT, prompt_length=32, numbers=np.stack(numbers)):
        for piece in pieces:
            wanted[piece.row] += piece.ids
    rows = deque(NewRow(tuple(prompt), NEW, each) for prompt, each in zip(prompts, numbers, strict=True))
    sampler = Sampler(template, config, jnp.float32, stops, slots=4)
    begun, asked, actual = rows.popleft(), list[int](), {number: list[int]() for number in wanted}

    def join(longest: int) -> list[NewRow]:
        """One, none, two, none, three, ..."""
        asked.append(longest)
        count = len(asked) % 2 * (len(asked) // 2 + 1)
        return [rows.popleft() for _ in range(min(count, len(rows)))]

    first = {"prompt_length": 32, "numbers": np.stack([begun.numbers]), "join": join}
    for pieces in sampler.pieces(leaves, [list(begun.prompt)], HOT, 3, **first):
        for piece in pieces:
            actual[piece.row] += piece.ids
    assert actual == wanted
    assert set(asked) == {32}


@pytest.mark.extended
def test_log_mass_is_zero_where_nothing_is_left_out(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("sliding windows")
    sampler = Sampler(template, config, jnp.float32, stop_ids=())
    for sampling in (HOT, Sampling(NEW)):
        (one, *_) = sampler.complete(leaves, groups(), sampling)
        assert not one.log_mass.any()
        assert (one.logps < 0).all()


def test_a_prompt_is_computed_once(build: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch) -> None:
    template, config, leaves = build("sliding windows")
    sampler, seen = Sampler(template, config, jnp.float32, stop_ids=(), slots=2), list[np.ndarray]()
    prefill = sampler._prefill

    def counted(shared: Any, ours: Any, tokens: np.ndarray, *rest: Any, **options: Any) -> Any:
        seen.append(tokens)
        return prefill(shared, ours, tokens, *rest, **options)

    monkeypatch.setattr(sampler, "_prefill", counted)
    sampler.complete(leaves, groups(), HOT)
    # Two at a time; the second time one that was computed fills the shape.
    assert [len(tokens) for tokens in seen] == [2, 2]
    assert len(np.unique(np.concatenate(seen), axis=0)) == 3


@pytest.mark.extended
def test_neither_a_cache_that_grows_nor_fewer_slots_change_a_draw(
    build: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    template, config, leaves = build("sliding windows")
    long, limits = attrs.evolve(HOT, max_new_tokens=40), [40, 3, 30, 9, 40, 17, 5]
    whole = Sampler(template, config, jnp.float32, (), slots=3).complete(leaves, groups(), long, limits=limits)
    monkeypatch.setattr(module, "LEAST_ROOM", 16)
    monkeypatch.setattr(module, "LEAST_SLOTS", {"cpu": 1})
    monkeypatch.setattr("nnxdsl.models.slots.PROMPTS", {"cpu": 2})
    sampler = Sampler(template, config, jnp.float32, (), slots=4)
    assert ids(sampler.complete(leaves, groups(), long, limits=limits)) == ids(whole)
    assert sampler._grown._cache_size() > 0
    assert sampler._shrunk._cache_size() > 0


@pytest.mark.extended
def test_a_pass_copies_neither_caches_nor_weights(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("sliding windows")
    sampler = Sampler(template, config, jnp.float32, stop_ids=(), slots=3)
    advance, seen = sampler._advance, list[str]()

    def compiled(*args: Any, **options: Any) -> Any:
        if not seen:
            seen.append(advance.lower(*args, **options).compile().as_text())
        return advance(*args, **options)

    sampler._advance = compiled
    sampler.complete(leaves, groups(), HOT)
    width, heads = config.of("global").head_dim, config.of("global").num_kv_heads
    caches = {f"3,{heads},{slots},{width}" for slots in (32 + NEW - 1, config.window)}
    copies = re.findall(r"= \w+\[([\d,]*)\][^ ]* (?:copy|slice|dynamic-slice)\(", seen[0])
    weights = {",".join(map(str, leaf.shape[1:])) for path, leaf in leaves.items() if params.is_stacked(path)}
    assert caches & set(re.findall(r"f32\[([\d,]*)\]", seen[0]))  # they are in the program
    assert not caches & set(copies)
    assert not {shape for shape in weights if "," in shape} & set(copies)


CHILD = """
import sys
sys.path.insert(0, {here!r})
import jax.numpy as jnp
from test_slots import HOT, build_model, groups
from nnxdsl.generate.sampler import Sampler
template, config, leaves = build_model("sliding windows")
for pieces in Sampler(template, config, jnp.float32, (), slots=3).stream(leaves, groups(), HOT, every=2):
    print(pieces, flush=True)
"""


@pytest.mark.extended
def test_a_killed_process_that_starts_again_draws_the_same(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("sliding windows")
    child = [sys.executable, "-c", CHILD.format(here=str(Path(__file__).parent))]
    with subprocess.Popen(child, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        before = [json.loads(killed.stdout.readline()) for _ in range(3)]
        killed.kill()
    again = Sampler(template, config, jnp.float32, (), slots=3).complete(leaves, groups(), HOT)
    rendered = [list(itertools.chain(*parts)) for parts in zip(*before, strict=True)]
    assert any(rendered)
    assert rendered == [one.ids[: len(tokens)] for one, tokens in zip(again, rendered, strict=True)]
