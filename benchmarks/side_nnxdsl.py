"""nnxdsl's side of the comparison of DPO steps; `dpo_step.py` runs it."""

from __future__ import annotations

import argparse
import importlib.metadata

import jax
import numpy as np
from side import Job, Turns, steps
from step_model import CONFIG, experiment

import nnxdsl
from nnxdsl import data
from nnxdsl.program import precomputed


def main() -> None:
    """Steps of a job with nnxdsl's program, on the batches that its own data floor makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--reference", choices=("cached", "online"), required=True)
    options = parser.parse_args()
    turns, job = Turns(), Job(options.job)
    asked = experiment(job.directory, job.numbers, options.reference)
    program = nnxdsl.compile(asked)
    state = program.init()
    pairs = data.load(asked.data, data.BytesTokenizer(), vocabulary=CONFIG.vocab_size)
    ahead = data.BatchSampler(
        pairs,
        batch_size=asked.batch_size,
        seed=asked.seed,
        order=asked.data.order,
        batching=asked.batching,
        blocks=program.blueprint.blocks,
    )
    batches = [ahead.batch_at(step) for step in range(len(job.pairs) // asked.batch_size)]
    if options.reference == "cached":
        batches = [
            jax.tree.map(np.asarray, precomputed.with_reference_logps(program, state, batch)) for batch in batches
        ]

    def one(step: int) -> float:
        nonlocal state
        state, metrics = program.step(state, batches[step % len(batches)])
        jax.block_until_ready(state)
        return float(metrics["loss"])

    steps(turns, one)
    shapes = {tuple(part.shape for part in jax.tree.leaves(batch)): batch for batch in batches}
    reports = [program.lower(batch).compile().memory_analysis() for batch in shapes.values()]
    turns.about = {
        "temporaries": max(report.temp_size_in_bytes for report in reports),
        "shapes": len(shapes),
        "versions": {name: importlib.metadata.version(name) for name in ("nnxdsl", "jax", "jaxlib", "flax", "qwix")},
    }
    turns.close()


if __name__ == "__main__":
    main()
