"""Sampling for online training: useful tokens a second, of groups of answers whose lengths are log-normal.

`python benchmarks/rollouts.py`; some minutes on two cores. A random Qwen 3 in float32, groups of 8 answers, temperature
1, lengths given beforehand (their sum over the time of a whole batch is what is printed). Each side is a process of its
own that is warm, and the sides take turns. Seconds of the CPU are printed too, of all threads together: on a busy
machine they vary less than the clock's.

- this library (`--before DIRECTORY`: also that of another checkout of this repository);
- `generate` of transformers, in another environment's python (`--transformers PYTHON`), which like an older sampler
  here has no limit for each row: a batch ends with its longest answer;
- vLLM on CPUs, in another environment's python (`--vllm PYTHON`): `LLM.generate` with the same weights and token ids,
  as many threads as cores, the log-probability of each token as here, and no prompts cached from the batch before.
"""

# ruff: noqa: PLC0415 - each side imports its own library, in a process of its own

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
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


def random_model() -> tuple[Any, Any, dict[str, Any]]:
    """The abstract model, its config, and weights."""
    import jax.numpy as jnp
    from flax import nnx

    from nnxdsl.models import params
    from nnxdsl.models.config.rope import Rope
    from nnxdsl.models.decoder import Decoder
    from nnxdsl.models.families.family import decoder
    from nnxdsl.models.families.qwen3 import FAMILY

    config = decoder(
        layers=NUM_LAYERS,
        embed=SHAPE["embed_dim"],
        mlp=MLP_DIM,
        heads=SHAPE["num_heads"],
        kv_heads=SHAPE["num_kv_heads"],
        head_dim=HEAD_DIM,
        vocab=SHAPE["vocab_size"],
        length=4096,
        rope=Rope(theta=1e6),
        **FAMILY.choices,
    )
    template = params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    leaves = {
        path: jnp.asarray(draw.standard_normal(leaf.shape, np.float32) * 0.02, leaf.dtype)
        for path, leaf in template.variables.items()
    }
    return template, config, leaves


def write_model(directory: Path) -> None:
    """Writes that model in the Hub's format."""
    from nnxdsl.formats import hf

    _, config, leaves = random_model()
    hf.write(directory, config, leaves, like="qwen3")


def own_side(rows: int, size: int, longest: int) -> Callable[[], None]:
    """Samples one batch with this library."""
    import jax.numpy as jnp

    from nnxdsl.generate.sampler import Sampler
    from nnxdsl.generate.sampling import Sampling

    template, config, leaves = random_model()
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


def vllm_side(rows: int, size: int, longest: int) -> Callable[[], None]:
    """Samples one batch with vLLM."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        os.environ["MODEL"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=size + longest,
        max_num_seqs=rows,
    )
    wanted = lengths(rows, longest).tolist()
    settings = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
        for length in wanted
    ]
    given_prompts: Any = [{"prompt_token_ids": prompt} for prompt in prompts(rows, size)]

    def run() -> None:
        llm.reset_prefix_cache()
        result = llm.generate(given_prompts, settings, use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in result] == wanted

    return run


SIDES = {"own": own_side, "transformers": transformers_side, "vllm": vllm_side}


def seconds(side: str) -> np.ndarray:
    """Seconds by the clock and of the CPU."""
    cpu = time.process_time()
    if side == "vllm":  # its workers are processes of their own
        import psutil

        children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        cpu += sum(each.user + each.system for each in children)
    return np.array([time.perf_counter(), cpu])


def serve(side: str, case: tuple[int, int, int]) -> None:
    """Runs one batch for each line of standard input, and prints its seconds by the clock and of the CPU."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM and its processes log to standard output
    run = SIDES[side](*case)
    run()  # compiles
    print("ready", file=results, flush=True)
    for _ in sys.stdin:
        start = seconds(side)
        run()
        print(*(seconds(side) - start), file=results, flush=True)


def start(command: list[str], side: str, case: tuple[int, int, int], home: Path) -> subprocess.Popen[str]:
    """The process of a side, once it is warm."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    vllm = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment = {**vllm, **os.environ, "PYTHONPATH": str(home)}
    options = ["--serve", side, "--case", *map(str, case)]
    process = subprocess.Popen(
        [*command, str(SIDE), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
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
    parser.add_argument("--vllm", help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, tuple(options.case))
        return
    here, result = Path(__file__).resolve().parents[1], dict[str, Any]()
    model = tempfile.TemporaryDirectory()
    if options.vllm:
        write_model(Path(model.name))
        os.environ["MODEL"] = model.name
    for size in options.prompts:
        case = options.rows, size, options.longest
        sides = {"now": start([sys.executable], "own", case, here)}
        if options.before:
            sides["before"] = start([sys.executable], "own", case, options.before)
        if options.transformers:
            sides["transformers"] = start([options.transformers], "transformers", case, here)
        if options.vllm:
            sides["vllm"] = start([options.vllm], "vllm", case, here)
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
