"""Answers: tokens a second against the time to read the weights, and policy and reference together against two calls.

`python benchmarks/decode.py`; a minute or two on two cores. Random weights of Gemma 3 270M's shape, with a LoRA adapter
on all linear layers; the vocabulary is smaller unless it is given. The time of a token is the difference of answers of
many tokens and of one, so that prompts are not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxdsl import Adapter
from nnxdsl.adapters import lora, lora_math
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.program.forward import Leaves


def drawn(template: params.AbstractModel, dtype: Any) -> Leaves:
    """Random weights; adapters are float32 in training, and in the dtype that is computed in here."""
    draw = np.random.default_rng(0)
    return {
        path: jnp.asarray(draw.standard_normal(leaf.shape, np.float32) * 0.02, dtype)
        for path, leaf in template.variables.items()
    }


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bandwidth(size: int, repeat: int) -> float:
    """Bytes a second, reads and writes together, of an addition in place: no page of it is new."""
    array = jnp.zeros(size // 4, jnp.float32)
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    took = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        array = add(array, np.float32(1)).block_until_ready()
        took.append(time.perf_counter() - start)
    return 2 * array.nbytes / min(took[1:])  # the first one is compiled


def main() -> None:
    """Measure and print, ratios first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="270m", choices=sorted(GEMMA3), help="of Gemma 3")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--rows", type=int, default=4, help="prompts")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=33, help="of an answer")
    parser.add_argument("--repeat", type=int, default=7, help="calls of each kind, in turn")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()

    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    config: DecoderConfig = attrs.evolve(GEMMA3[options.size], vocab_size=options.vocabulary)
    adapt = lora.adapt(Adapter.LoRA(rank=8), None, config)
    template = params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, adapt=adapt))
    policy = drawn(template, dtype)
    reference = lora_math.disable_adapter(policy)
    sampler = Sampler(template, config, dtype, stop_ids=())
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, (options.rows, options.prompt)).tolist()

    def answers(models: list[Leaves], tokens: int) -> None:
        sampler.together(models, prompts, Sampling(tokens))

    def apart(tokens: int) -> None:
        for model in (policy, reference):
            answers([model], tokens)

    kinds: dict[str, Callable[[int], None]] = {
        "one": lambda tokens: answers([policy], tokens),
        "two calls": apart,
        "together": lambda tokens: answers([policy, reference], tokens),
    }
    took: dict[str, dict[int, list[float]]] = {name: {1: [], options.tokens: []} for name in kinds}
    for turn in range(options.repeat + 1):
        for name, answer in kinds.items():
            for tokens, found in took[name].items():
                one = seconds(lambda answer=answer, tokens=tokens: answer(tokens))
                if turn:  # the first one is compiled
                    found.append(one)
    # Least times, not times of pairs: what the machine does beside is in all of them.
    each = {name: (min(found[options.tokens]) - min(found[1])) / (options.tokens - 1) for name, found in took.items()}
    read = sum(leaf.nbytes for leaf in policy.values())
    rate = bandwidth(read, options.repeat)
    found = {
        "seconds a token": each,
        "tokens/s": options.rows / each["one"],
        "weights, bytes": read,
        "bandwidth, bytes/s": rate,
        "share of the floor": read / rate / each["one"],
        "times": {name: {str(tokens): values for tokens, values in kind.items()} for name, kind in took.items()},
    }
    print(f"{platform.machine()}, {jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"two calls / together  {each['two calls'] / each['together']:.2f} a token:", end=" ")
    print(", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in each.items()))
    whole = {name: statistics.median(kind[options.tokens]) for name, kind in took.items()}
    print(f"  of whole calls, medians  {whole['two calls'] / whole['together']:.2f}:", end=" ")
    print(", ".join(f"{name} {value:.2f} s" for name, value in whole.items()))
    print(f"floor / one  {found['share of the floor']:.2f}: {read / 2**20:,.0f} MiB of weights", end=" ")
    print(f"at {rate / 1e9:.1f} GB/s are {read / rate * 1e3:.1f} ms;", end=" ")
    print(f"{found['tokens/s']:.1f} tokens/s, {options.rows} rows")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
