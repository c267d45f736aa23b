"""Sampling for online training: useful tokens a second, of groups of answers whose lengths are log-normal.

`python benchmarks/rollouts.py`; some minutes on two cores. A random Qwen3-shaped model in float32, groups of 8 answers,
temperature 1, lengths given beforehand (their sum over the time of a whole batch is what is printed). Each side is a
process of its own that is warm, and the sides take turns. Seconds of the CPU are printed too, of all threads together:
on a busy machine they vary less than the clock's.

- this library (`--before DIRECTORY`: also that of another checkout of this repository);
- `generate` of transformers, in another environment's python (`--transformers PYTHON`), which like an older sampler
  here has no limit for each row: a batch ends with its longest answer.
"""

# ruff: noqa: PLC0415 - each side imports its own library, in a process of its own

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIDE = Path(__file__)
SHAPE = {"vocab_size": 32_768, "embed_dim": 512, "num_heads": 8, "num_kv_heads": 4}
MLP_DIM, NUM_LAYERS = 1536, 8
HEAD_DIM, GROUP = 64, 8


def lengths(rows: int, longest: int) -> np.ndarray:
    """Tokens of each answer: log-normal with a median of 74."""
    samples = np.random.default_rng(1).lognormal(np.log(74), 0.7, rows)
    return np.clip(samples.astype(int), 1, longest)


def prompts(rows: int, size: int) -> list[list[int]]:
    """Token ids, `GROUP` equal prompts one after another."""
    result = np.random.default_rng(2).integers(10, SHAPE["vocab_size"], (rows // GROUP, size)).tolist()
    return [prompt for prompt in result for _ in range(GROUP)]


def own_side(rows: int, size: int, longest: int) -> Callable[[], None]:
    """Samples one batch with this library."""
    import jax.numpy as jnp
    from flax import nnx

    from nnxdsl.generate.sampler import Sampler
    from nnxdsl.generate.sampling import Sampling
    from nnxdsl.models import params
    from nnxdsl.models.config.attention import AttentionConfig
    from nnxdsl.models.config.decoder import DecoderConfig
    from nnxdsl.models.config.feed_forward import MLPConfig
    from nnxdsl.models.config.layer_pattern import LayerPattern
    from nnxdsl.models.decoder import Decoder

    fields: dict[str, Any] = {
        "attention": AttentionConfig(query_scale=HEAD_DIM**-0.5, query_key_norm="head"),
        "max_length": 4096,
        "mlp": MLPConfig(dim=MLP_DIM, activation="gelu_tanh"),
        "layers": LayerPattern(num_layers=NUM_LAYERS),
    }
    config = DecoderConfig(**SHAPE, head_dim=HEAD_DIM, **fields)
    template = params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    leaves = {
        path: jnp.asarray(draw.standard_normal(leaf.shape, np.float32) * 0.02, leaf.dtype)
        for path, leaf in template.variables.items()
    }
    sampler, wanted = Sampler(template, config, jnp.float32, stop_ids=()), lengths(rows, longest)
    sampling, given_prompts = Sampling(int(wanted.max()), 1.0, seed=3), prompts(rows, size)

    def run() -> None:
        if hasattr(sampler, "complete"):
            result = sampler.complete(leaves, given_prompts, sampling, limits=wanted.tolist())
            assert [len(one.ids) for one in result] == wanted.tolist()
        else:  # an older checkout
            sampler.drawn(leaves, given_prompts, sampling)  # pyright: ignore[reportAttributeAccessIssue]

    return run


def transformers_side(rows: int, size: int, longest: int) -> Callable[[], None]:
    """Samples one batch with transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3Config, Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]

    config = Qwen3Config(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["embed_dim"],
        intermediate_size=MLP_DIM,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_kv_heads"],
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
    )
    model, ids = Qwen3ForCausalLM(config).eval(), torch.tensor(prompts(rows, size))
    most = int(lengths(rows, longest).max())

    def run() -> None:
        with torch.no_grad():
            model.generate(ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=most, min_new_tokens=most)

    return run


SIDES = {"own": own_side, "transformers": transformers_side}


def serve(side: str, case: tuple[int, int, int]) -> None:
    """Runs one batch for each line of standard input, and prints its seconds by the clock and of the CPU."""
    run = SIDES[side](*case)
    run()  # compiles
    print("ready", flush=True)
    for _ in sys.stdin:
        start = np.array([time.perf_counter(), time.process_time()])
        run()
        print(*(np.array([time.perf_counter(), time.process_time()]) - start), flush=True)


def start(command: list[str], side: str, case: tuple[int, int, int], home: Path) -> subprocess.Popen[str]:
    """The process of a side, once it is warm."""
    environment = {**os.environ, "PYTHONPATH": str(home)}
    options = ["--serve", side, "--case", *map(str, case)]
    process = subprocess.Popen(
        [*command, str(SIDE), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"the side {side} ended with {process.wait()}")
    return process


def main() -> None:
    """Measure and print, ratios first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help=f"answers, a multiple of {GROUP}")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="tokens of a prompt, each a case")
    parser.add_argument("--longest", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3, help="batches of each side, in turn")
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--transformers", help="the python of an environment with transformers and torch")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, tuple(options.case))
        return
    here, result = Path(__file__).resolve().parents[1], dict[str, Any]()
    for size in options.prompts:
        case = options.rows, size, options.longest
        sides = {"now": start([sys.executable], "own", case, here)}
        if options.before:
            sides["before"] = start([sys.executable], "own", case, options.before)
        if options.transformers:
            sides["transformers"] = start([options.transformers], "transformers", case, here)
        took: dict[str, list[list[float]]] = {name: [] for name in sides}
        for _ in range(options.repeat):
            for name, process in sides.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                took[name].append([float(part) for part in process.stdout.readline().split()])
        for process in sides.values():
            process.communicate()
        useful = int(lengths(options.rows, options.longest).sum())
        medians = {name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in took.items()}
        print(f"prompts of {size}: {useful:,} tokens of {options.rows} answers")
        for name, (clock, cpu) in medians.items():
            ratios = f"{clock / medians['now'][0]:.2f} by the clock, {cpu / medians['now'][1]:.2f} by the CPU"
            print(f"  now / {name}  {ratios}: {useful / clock:,.0f} tokens/s, {useful / cpu:,.0f} tokens a CPU second")
        result[str(size)] = {"useful tokens": useful, "clock and CPU seconds": took}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
