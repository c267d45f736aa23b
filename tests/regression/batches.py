"""The one file of these tests that uses nnxdsl beyond its public API: batches for `Program.step`, and its results.

Everything else goes by `nnxdsl.*` and the command line. Where the data layer or the methods of `Program` get other
names, this file changes and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import results
from results import Result

import nnxdsl
from nnxdsl import Experiment
from nnxdsl.data import BatchSampler, BytesTokenizer, load
from nnxdsl.program import precomputed


def batches(experiment: Experiment, blocks: int) -> BatchSampler:
    """The batches of an experiment whose tokens are bytes."""
    rows = load(experiment.data, BytesTokenizer(), vocabulary=320)
    return BatchSampler(
        rows,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        order=experiment.data.order,
        batching=experiment.batching,
        blocks=blocks,
    )


def steps(experiment: Experiment, *, count: int = 4, is_precomputed: bool = False) -> Result:
    """Steps and an evaluation by the compiled program, as other people's loops use it.

    Args:
        experiment: Of the bytes as tokens.
        count: Steps.
        is_precomputed: Whether batches carry what the first state's policy says of their pairs.
    """
    program = nnxdsl.compile(experiment)
    state = program.init()
    rows = batches(experiment, program.blueprint.blocks)
    inputs = [rows.batch_at(step) for step in range(count)]
    if is_precomputed:
        inputs = [precomputed.with_reference_logps(program, state, batch) for batch in inputs]
    series: dict[str, list[float]] = {}
    before = program.evaluate(state, inputs[0])
    for batch in inputs:
        state, metrics = program.step(state, batch)
        _note(series, "", metrics)
    after = program.evaluate(state, inputs[0])
    for ratios in (before, after):
        _note(series, "evaluated ", {name: ratio.total / ratio.count for name, ratio in ratios.items()})
    leaves = jax.device_get(jax.tree.leaves(state))
    return {
        "series": series,
        "sums": {"arrays": results.magnitudes(leaves)},
        "exact": {"layout": results.sha(sorted(" ".join(x.split()[1:]) for x in program.layout.dump().splitlines()))},
        "bits": {"state": results.of_arrays(leaves)},
    }


def _note(series: dict[str, list[float]], prefix: str, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        series.setdefault(prefix + name, []).append(results.shortened(value))
