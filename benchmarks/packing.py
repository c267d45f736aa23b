"""How much of a batch is real tokens, and how long a step takes, padded, bucketed and packed.

`python benchmarks/packing.py` needs no data beyond the repository's: lengths are those of the shipped pairs, and drawn
from log-normal distributions with about the medians of UltraFeedback's pairs under the tokenizer of Gemma 3 (prompts of
130 tokens with sigma 0.9, cut at 512; completions of 320 tokens with sigma 0.7, both of a pair with a common factor,
cut at 512). Steps of random weights are timed on the first device, padded and packed by turns; ratios come first.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from nnxdsl import Adapter, Batching, Data, Experiment, Memory, Model, Objective, Optimizer, Order, Schedule, compile
from nnxdsl.data import BatchSampler, BytesTokenizer, Dataset, Pairs, load
from nnxdsl.data.batch import Batch, PackedPairs, PairBatch, non_padding_fraction
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.ragged import RaggedBuilder

WAYS = (Batching.Padded(), Batching.Bucketed(), Batching.Packed())
SHIPPED = Path(__file__).parent.parent / "experiments" / "data" / "preferences.jsonl"
STEPS = 40
PARTS = ("prompt", "chosen", "rejected")


def random_pairs(rows: int, shrink: int = 1) -> Pairs:
    """Pairs of random tokens with the lengths of the module's docstring, all divided by `shrink`."""
    draw = np.random.default_rng(0)
    common = draw.lognormal(np.log(320), 0.6, rows)
    lengths = {
        "prompt": draw.lognormal(np.log(130), 0.9, rows),
        "chosen": common * draw.lognormal(0, 0.36, rows),
        "rejected": common * draw.lognormal(0, 0.36, rows),
    }
    parts = {}
    for name in PARTS:
        builder = RaggedBuilder()
        for length in (lengths[name].clip(8, 512) / shrink).astype(int).clip(1):
            builder.add(draw.integers(1, 256, length).tolist())
        parts[name] = builder.build()
    report = Report(source="drawn", rows=rows, accepted=rows, cut={}, dropped={}, odd={}, first={}, lengths={})
    return Pairs(TokenizedRows(parts, [f"drawn:{row + 1}" for row in range(rows)], report, "drawn", is_chat=False))


def target_share(batch: Batch) -> float:
    """Share of the slots of which a log-probability is computed whose target is real."""
    assert isinstance(batch, PairBatch | PackedPairs)
    slots = np.size(batch.target) if isinstance(batch, PackedPairs) else 2 * np.size(batch.chosen)
    return float(((batch.chosen_length + batch.rejected_length) * batch.weight).sum()) / slots


def shares(dataset: Dataset, size: int, blocks: int) -> dict[str, dict[str, float]]:
    """By way of batching: the share of real tokens and of real targets over the first steps, and programs compiled."""
    result = {}
    for way in WAYS:
        batches = BatchSampler(dataset, batch_size=size, seed=0, order=Order.Shuffled(), batching=way, blocks=blocks)
        began = time.perf_counter()
        made = [batches.batch_at(step) for step in range(STEPS)]
        seconds = (time.perf_counter() - began) / STEPS
        result[type(way).__name__] = {
            "tokens": statistics.mean(map(non_padding_fraction, made)),
            "targets": statistics.mean(map(target_share, made)),
            "shapes": len({tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)) for batch in made}),
            "ms": 1e3 * seconds,
        }
    return result


def step_seconds(model: str, size: int, micro: int | None, shrink: int, turns: int) -> dict[str, list[float]]:
    """Seconds a step, by way of batching, of the same pairs; one program of each shape is compiled before."""
    dataset = random_pairs(4096, shrink)
    experiment = Experiment(
        name="packing",
        model=Model.Gemma3(model),  # pyright: ignore[reportArgumentType]
        adapter=Adapter.LoRA(rank=16),
        objective=Objective.DPO(),
        data=Data.Preferences("none.jsonl"),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
        batch_size=size,
        microbatch_size=micro,
        steps=1000,
        memory=Memory(remat="none" if model == "tiny" else "full"),
    )
    program = compile(experiment)
    state, blocks = program.init(), program.blueprint.blocks
    logps = np.full((len(dataset), 2), -100.0, np.float32)
    seconds: dict[str, list[float]] = {}
    for turn in range(-1, turns):  # the first turn compiles
        for way in (Batching.Padded(), Batching.Packed()):
            known = dataset.with_reference_logps(logps)
            batches = BatchSampler(known, batch_size=size, seed=0, order=Order.Shuffled(), batching=way, blocks=blocks)
            for step in range(4):
                batch = program.shard_batch(batches.batch_at(step))
                jax.block_until_ready(batch)
                began = time.perf_counter()
                state, metrics = program.step(state, batch)
                jax.block_until_ready(metrics)
                if turn >= 0:
                    seconds.setdefault(type(way).__name__, []).append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Print the shares, then the ratio of step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="size of the Gemma 3 whose steps are timed")
    parser.add_argument("--batch", type=int, default=32, help="pairs of a timed step")
    parser.add_argument("--micro", type=int, help="pairs of a micro-batch")
    parser.add_argument("--shrink", type=int, default=8, help="what the lengths of timed pairs are divided by")
    parser.add_argument("--turns", type=int, default=3, help="turns of four steps each way")
    options = parser.parse_args()
    shipped = load(Data.Preferences(str(SHIPPED)), BytesTokenizer())
    print(f"python {platform.python_version()}, jax {jax.__version__}, {jax.devices()[0].device_kind}, {STEPS} steps")
    line = "{:<10} {:>6} {:>7} {:<9} {:>12} {:>13} {:>7} {:>9}"
    print(line.format("lengths", "pairs", "blocks", "batching", "real tokens", "real targets", "shapes", "ms/batch"))
    for name, dataset in (("shipped", shipped), ("drawn", random_pairs(20_000))):
        for size, blocks in ((32, 1), (64, 1), (64, 8), (256, 1), (256, 8)):
            for way, result in shares(dataset, size, blocks).items():
                share = [f"{result[part]:.1%}" for part in ("tokens", "targets")]
                print(line.format(name, size, blocks, way, *share, int(result["shapes"]), f"{result['ms']:.2f}"))
    seconds = step_seconds(options.model, options.batch, options.micro, options.shrink, options.turns)
    padded, packed = seconds["Padded"], seconds["Packed"]
    print(f"padded / packed: {statistics.median(padded) / statistics.median(packed):.2f} (medians)")
    for way, times in seconds.items():
        print(f"{way:<9} min {min(times):.3f} s   median {statistics.median(times):.3f} s")


if __name__ == "__main__":
    main()
