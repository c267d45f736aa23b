"""How near layers of published widths are to transformers: the third table of docs/guides/models.md.

`python benchmarks/family_layers.py --peers PYTHON [NAME ...]` builds, of the smallest published size of every family,
the layers of one period (and one of the dense layers before them, where there are any) with random float32 weights and
a vocabulary of 512, exports them, and compares their logits for two rows of 16 tokens with those of transformers in
that environment: the largest difference, relative to the largest logit. Where these need more than `--gib` GiB, layers
have twice as many experts as a token goes through, of unchanged width; and where they still need more than 4 GiB, there
is one layer of each kind, and at last no dense layer before them. `--update` writes the lines into the table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import family_parity
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.family import Family
from nnxdsl.models.families.registry import FAMILIES
from nnxdsl.models.params import flatten

SCRIPT = family_parity.REFERENCE.parent / "make_families.py"
TITLE, COLUMNS = "layers of", ("size", "layers", "parameters", "logits")
VOCAB, ROWS, TOKENS = 512, 2, 16
SMALLER_GIB = 4.0
"""The largest model without all its experts and layers; of every family there is such a one."""


def one_period(config: DecoderConfig) -> DecoderConfig:
    """The decoder with as few layers as have one of each kind, and with a small vocabulary."""
    layers = config.layers
    if layers.sublayers == "one":  # whose layers follow no pattern
        kinds = tuple(dict.fromkeys(layers.kinds))
        layers = attrs.evolve(layers, pattern=kinds, tail_pattern=(), num_layers=len(kinds))
    lead, per_layer, shared = min(layers.dense_layers, 1), config.per_layer_embedding, len(layers.kv_shared_pattern)
    return attrs.evolve(
        config,
        vocab_size=VOCAB,
        layers=attrs.evolve(
            layers, dense_layers=lead, num_layers=lead + layers.period + shared, num_kv_shared_layers=shared
        ),
        per_layer_embedding=None if per_layer is None else attrs.evolve(per_layer, vocab_size=VOCAB),
    )


def with_few_experts(config: DecoderConfig) -> DecoderConfig:
    """The decoder with twice as many experts as a token goes through, or twice as many as there are groups."""
    if not isinstance(config.feed_forward, MoEConfig):
        return config
    moe = config.feed_forward
    return attrs.evolve(
        config, feed_forward=attrs.evolve(moe, num_experts=2 * max(moe.num_experts_per_tok, moe.n_group))
    )


def one_of_each(config: DecoderConfig) -> DecoderConfig:
    """The decoder with one layer of each kind, with and without experts, after the dense ones."""
    layers = config.layers
    flags = layers.dense_pattern or (False,) * layers.period
    kinds, dense = zip(*dict.fromkeys(zip(layers.pattern, flags, strict=True)), strict=True)
    fewer = attrs.evolve(
        layers,
        num_layers=layers.dense_layers + len(kinds),
        pattern=kinds,
        dense_pattern=dense if layers.dense_pattern else (),
    )
    return attrs.evolve(config, layers=fewer)


def without_lead(config: DecoderConfig) -> DecoderConfig:
    """The decoder without the dense layers before the others."""
    layers = config.layers
    return config.with_fields({"layers.num_layers": layers.num_layers - layers.dense_layers, "layers.dense_layers": 0})


def fitting(config: DecoderConfig, gib: float) -> tuple[DecoderConfig, str]:
    """The layers of one period, or fewer experts and layers where they need more than `gib`; and what they are."""
    whole = one_period(config)
    if parameters(whole) * 4 <= gib * 2**30:
        return whole, str(whole.layers.num_layers)
    small = with_few_experts(whole)
    each = one_of_each(small)
    smaller = next(
        config for config in (small, each, without_lead(each)) if parameters(config) * 4 <= SMALLER_GIB * 2**30
    )
    if smaller.moe is None or whole.moe is None:
        return smaller, str(smaller.layers.num_layers)
    return smaller, f"{smaller.layers.num_layers}, {smaller.moe.num_experts} of {whole.moe.num_experts} experts"


def parameters(config: DecoderConfig) -> int:
    """The number of parameters."""
    template = abstract_decoder(config)
    return sum(int(np.prod(leaf.shape)) for leaf in template.variables.values())


def smallest(family: Family) -> str:
    """The published size whose period has the fewest parameters."""
    published = [size for size in family.sizes if not size.startswith("tiny")]
    return min(published, key=lambda size: parameters(one_period(family.sizes[size])))


def compared(family: Family, config: DecoderConfig, python: Path) -> float:
    """The largest difference of logits from transformers, relative to the largest logit."""
    template = abstract_decoder(config)
    leaves = jax.jit(lambda: flatten(Decoder(config, rngs=nnx.Rngs(0))))()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    places = positions_right_padded(jnp.full((ROWS,), TOKENS), TOKENS)
    result = np.asarray(family_parity.logits_of(template)(leaves, tokens, places))
    with tempfile.TemporaryDirectory() as place:
        hf.write(place, config, leaves, like=family.model_types[0])
        del leaves
        np.save(Path(place) / "tokens.npy", tokens)
        argv = [str(python), str(SCRIPT), "logits", place]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return family_parity.relative(result, np.load(Path(place) / "logits.npy"))


def main() -> int:
    """What the command line asks for; 1 if a figure is above 1e-4, of recurrent layers 1e-3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="spec classes, such as Gemma3; all of them if there is none")
    parser.add_argument("--peers", type=Path, required=True, help="a Python with torch and transformers")
    parser.add_argument("--gib", type=float, default=6.5, help="the largest model with all its experts, in GiB")
    parser.add_argument("--update", action="store_true", help="write the lines into docs/guides/models.md")
    options = parser.parse_args()
    rows, bad = {}, False
    for family in FAMILIES:
        name = family.spec.__name__
        if options.names and name not in options.names:
            continue
        size = smallest(family)
        config, layers = fitting(family.sizes[size], options.gib)
        value = compared(family, config, options.peers)
        bad |= not value <= (1e-3 if "linear" in config.layers.kinds else 1e-4)
        cells = size, layers, f"{parameters(config) / 1e6:,.0f} million", family_parity.entry(value)
        rows[name] = dict(zip(COLUMNS, cells, strict=True))
        print(name, *cells, flush=True)
    text = family_parity.table(rows, TITLE, COLUMNS)
    print(f"\n{text}")
    if options.update:
        family_parity.update(text)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
