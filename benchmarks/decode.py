"""Answers: tokens a second against the time to read the weights, and policy and reference together against two calls.

`python benchmarks/decode.py`; a minute or two on two cores. Random weights of Gemma 3 270M's shape, with a LoRA adapter
on all linear layers; the vocabulary is smaller unless it is given. The time of a token is the difference of answers of
many tokens and of one, so that prompts are not counted.

`python benchmarks/decode.py --speculative STEPS` measures speculative decoding instead: a tiny DeepSeek-V3 with its
multi-token-prediction layer learns experiments/data/instructions.jsonl for so many steps and answers held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Tokenizer
from nnxdsl.adapters import lora, lora_math
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.program.forward import Leaves
from nnxdsl.weights.export import export

INSTRUCTIONS = Path("experiments/data")


def random_leaves(template: params.AbstractModel, dtype: Any) -> Leaves:
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


def learnt(steps: int) -> Pretrained:
    """A tiny model that was trained with multi-token prediction."""
    experiment = Experiment(
        name="speculative",
        model=Model.DeepSeekV3("tiny", mtp_layers=1),
        objective=Objective.SFT(mtp_loss_weight=0.3),
        data=Data.Conversations(str(INSTRUCTIONS / "instructions.jsonl"), max_length=128),
        optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1)),
        batch_size=16,
        steps=steps,
        evaluation=None,
    )
    with tempfile.TemporaryDirectory() as place:
        result = experiment.run(place, quiet=True)
        last = result.metrics[-1]
        print(f"{steps} steps: loss {last['loss']:.3f}, mtp_loss {last['mtp_loss']:.3f}")
        export(result.directory, Path(place) / "model")
        return nnxdsl.load(Path(place) / "model", mtp=True, tokenizer=Tokenizer.Bytes(allow_mismatch=True))


def speculative(steps: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Tokens that a pass of the model yields, and times, by number of drafts, of prompts and temperature."""
    model = learnt(steps)
    template = params.abstract(lambda: Decoder(model.config, rngs=nnx.Rngs(0)))
    sampler = Sampler(template, model.config, jnp.float32, stop_ids(model.tokenizer))
    lines = (INSTRUCTIONS / "instructions_held_out.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["messages"][:-1] for line in lines]
    prompts = [Encoder(model.tokenizer).prompt(messages) for messages in asked]
    result: dict[str, Any] = {}
    for rows, temperature in ((1, 0.0), (8, 0.0), (8, 1.0)):
        batches = [prompts[start : start + rows] for start in range(0, 16, rows)]
        kinds = [Sampling(tokens, temperature, seed=1, num_speculative_tokens=drafts) for drafts in range(4)]
        times: list[list[float]] = [[] for _ in kinds]
        answers = [[sampler.complete(model.leaves, batch, kind) for batch in batches] for kind in kinds]
        for _ in range(repeat):
            for kind, took in zip(kinds, times, strict=True):
                took.append(sum(seconds(lambda b=b, k=kind: sampler.complete(model.leaves, b, k)) for b in batches))
        plain = [one.ids for part in answers[0] for one in part]
        for kind, ours, took in zip(kinds, answers, times, strict=True):
            ids, passes = zip(*((one.ids, one.passes) for part in ours for one in part), strict=True)
            equal = sum(one == other for one, other in zip(ids, plain, strict=True))
            rate = sum(len(row) - 1 for row in ids) / sum(passes)
            name = f"{rows} rows, temperature {temperature:g}, {kind.num_speculative_tokens} drafts"
            result[name] = {"tokens a pass": rate, "seconds": took, "equal": equal, "of": len(ids)}
            print(f"{min(times[0]) / min(took):.2f} times as fast, {rate:.2f} tokens a pass: {name};", end=" ")
            print(f"{min(took):.3f} s, {equal} of {len(ids)} answers equal", flush=True)
    return result


def main() -> None:
    """Measure and print, ratios first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="270m", choices=sorted(GEMMA3), help="of Gemma 3")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--rows", type=int, default=4, help="prompts")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=33, help="of an answer")
    parser.add_argument("--repeat", type=int, default=7, help="calls of each kind, in turn")
    parser.add_argument(
        "--speculative", type=int, metavar="STEPS", help="measure speculative decoding after STEPS steps"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.speculative:
        figures = speculative(options.speculative, options.tokens, options.repeat)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
        return

    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    config: DecoderConfig = attrs.evolve(GEMMA3[options.size], vocab_size=options.vocabulary)
    adapt = lora.adapt(Adapter.LoRA(rank=8), None, config)
    template = params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, adapt=adapt))
    policy = random_leaves(template, dtype)
    reference = lora_math.disable_adapter(policy)
    sampler = Sampler(template, config, dtype, stop_ids=())
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, (options.rows, options.prompt)).tolist()

    def answers(models: list[Leaves], tokens: int) -> None:
        sampler.sample_models(models, prompts, Sampling(tokens))

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
            for tokens, result in took[name].items():
                one = seconds(lambda answer=answer, tokens=tokens: answer(tokens))
                if turn:  # the first one is compiled
                    result.append(one)
    # Least times, not times of pairs: what the machine does beside is in all of them.
    each = {
        name: (min(result[options.tokens]) - min(result[1])) / (options.tokens - 1) for name, result in took.items()
    }
    read = sum(leaf.nbytes for leaf in policy.values())
    rate = bandwidth(read, options.repeat)
    result = {
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
    print(f"floor / one  {result['share of the floor']:.2f}: {read / 2**20:,.0f} MiB of weights", end=" ")
    print(f"at {rate / 1e9:.1f} GB/s are {read / rate * 1e3:.1f} ms;", end=" ")
    print(f"{result['tokens/s']:.1f} tokens/s, {options.rows} rows")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
