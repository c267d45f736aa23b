"""What it gains to compute a pair's prompt once for both completions, against the work that it saves.

`python benchmarks/prefix_sharing.py` takes the same LoRA-DPO step twice by turns: as nnxdsl takes it, on rows
`[prompt | chosen | rejected]`, and on two ordinary causal rows for each pair. The gain in time should be 85 % of what
the saved products promise; gradients must agree within 1e-5, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import step_model

import nnxdsl
from nnxdsl.data import PairBatch
from nnxdsl.data.batch import Batch
from nnxdsl.losses.base import PairLogps
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.logical_axes import sharding_hooks
from nnxdsl.program.batches import Targets
from nnxdsl.program.compile import build_step
from nnxdsl.program.forward import Forward, ForwardOutput, Leaves
from nnxdsl.program.heads import HeadInputs
from nnxdsl.program.step import DonatedState

SHAPES = ((8, 128), (128, 128), (192, 96), (256, 64), (320, 40))
"""Tokens of the prompt and of each completion: the prompt is 0.06, 1, 2, 4 and 8 times as long."""

AIM = 0.85
"""Part of the gain that the saved products promise."""

SAME = 1e-5
"""By how much gradients may differ, of the largest of their array."""

PAIRS, RANK = 4, 16
HEADINGS = "{:>6} {:>9} {:>8} {:>7} {:>9} {:>11} {:>11} {:>13} {:>13} {:>13}"
HEADED = (
    *("prompt", "response", "reached", "gained", "promised"),
    *("shared min", "twice min", "shared median", "twice median", "gradients off"),
)


class Twice(Forward):
    """A forward pass that computes the prompt of a pair before each of its completions. All rows must be full."""

    def read(self, model: Decoder, batch: Batch, teacher: Any = None) -> ForwardOutput:
        """As `Forward.read`, of pairs, from rows `[prompt | completion]` [2B, P + R]."""
        assert isinstance(batch, PairBatch)
        ids = jnp.concatenate([batch.chosen, batch.rejected])  # [2B, R]
        tokens = jnp.concatenate([jnp.concatenate([batch.prompt, batch.prompt]), ids], axis=1)
        rows, length = tokens.shape
        positions = positions_right_padded(jnp.full(rows, length, jnp.int32), length)
        with sharding_hooks(self.sharding.constrain, self.sharding.shard_weights, self.sharding.shard_map_call):
            hidden = self._decode(model, tokens, positions, row_layout.sequence(length)).hidden
        inputs = HeadInputs(model, batch, hidden, self.logprob_tokens, self.shard_context)
        stats = inputs.token_stats(Targets(hidden[:, -ids.shape[1] - 1 : -1], ids, jnp.ones(ids.shape, bool)))
        chosen, rejected = jnp.split(jnp.sum(stats.logp, axis=1), 2)
        lengths = (batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32))
        # As one row for each pair, as the caller expects them.
        by_pair = TokenStats(*(jnp.concatenate(jnp.split(x, 2), 1) for x in stats))
        return ForwardOutput(PairLogps(chosen, rejected, *lengths), by_pair, None)


def flops(prompt: int, response: int, *, is_shared: bool) -> float:
    """Products of a LoRA step for one pair, without the reference.

    Those of the frozen weights twice (forward, and to the inputs), of the head twice, of attention three times over
    the pairs of tokens that see each other, of adapters three times.
    """
    config = step_model.CONFIG
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embed, mlp = config.embed_dim, config.mlp.dim
    matrices = config.layers.num_layers * (2 * embed * heads + 2 * embed * kv_heads + 3 * embed * mlp)
    adapters = config.layers.num_layers * RANK * (2 * (embed + heads) + 3 * (embed + mlp))
    ordinary = prompt + response
    tokens = prompt + 2 * response if is_shared else 2 * ordinary
    in_prompt, in_response = prompt * (prompt + 1) / 2, response * (response + 1) / 2
    seen = (1 if is_shared else 2) * in_prompt + 2 * (response * prompt + in_response)
    attention = 4 * heads * seen * config.layers.num_layers
    head = config.vocab_size * embed * 2 * response
    return 2 * 2 * matrices * tokens + 2 * 2 * head + 3 * attention + 3 * 2 * adapters * tokens


def rollout_batch(prompt: int, response: int) -> PairBatch:
    """Full rows of random tokens, with a reference that says 0 of each."""
    draw = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return draw.integers(1, step_model.CONFIG.vocab_size, (PAIRS, length)).astype(np.int32)

    lengths = (np.full(PAIRS, length, np.int32) for length in (prompt, response, response))
    known = np.zeros(PAIRS, np.float32)
    return PairBatch(ids(prompt), ids(response), ids(response), *lengths, np.ones(PAIRS, np.float32), known, known)


def compare(prompt: int, response: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    numbers = {"batch": PAIRS, "prompt": prompt, "response": response, "beta": 0.1, "learning_rate": 1e-5}
    numbers |= {"rank": RANK, "alpha": 32.0, "lora": True, "spread": False, "seed": 0}
    with tempfile.TemporaryDirectory() as place:
        program = nnxdsl.compile(step_model.experiment(Path(place), numbers, "cached", random=True))
    state = program.init()
    shared = program.policy_loss
    twice = attrs.evolve(shared, forward=Twice(**attrs.asdict(shared.forward, recurse=False)))
    batch = program.shard_batch(rollout_batch(prompt, response))
    # With B = 0 nothing would be learnt about A.
    trainable = {path: 0.02 * jnp.cos(jnp.arange(x.size)).reshape(x.shape) for path, x in state.trainable.items()}
    gradients = [jax.jit(one.grads)(trainable, state.frozen, {}, batch)[0] for one in (shared, twice)]
    fields = DonatedState(state.step, trainable, state.optimizer, {}), state.frozen, {}, batch
    steps = [build_step(program.blueprint, program.mesh, one) for one in (shared, twice)]
    sides = [jax.jit(step).lower(*fields).compile() for step in steps]
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(side(*fields))
            if turn:  # the first warms up
                taken.append(time.perf_counter() - start)
    promised = flops(prompt, response, is_shared=False) / flops(prompt, response, is_shared=True)
    gained = min(seconds[1]) / min(seconds[0])
    return {
        "prompt": prompt,
        "response": response,
        "promised": promised,
        "gained": gained,
        "gained_by_turn": statistics.median(theirs / ours for ours, theirs in zip(*seconds, strict=True)),
        "part": gained / promised,
        "shared": seconds[0],
        "twice": seconds[1],
        "temporaries": [side.memory_analysis().temp_size_in_bytes for side in sides],
        "gradients_off": off(*gradients),
    }


def off(one: Leaves, other: Leaves) -> float:
    """The largest difference of an array's gradients, of its largest."""
    return max(float(jnp.max(jnp.abs(one[path] - other[path])) / jnp.max(jnp.abs(one[path]))) for path in one)


def main() -> int:
    """The table; 1 if gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--json", type=Path, help="where all figures go as well")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    print(", ".join(f"{name} {value}" for name, value in versions.items()), f"{os.cpu_count()} cores", sep=", ")
    print(HEADINGS.format(*HEADED))
    result = []
    for prompt, response in SHAPES:
        row = compare(prompt, response, options.rounds)
        result.append(row)
        times = [f"{figure(row[side]):.3f}" for figure in (min, statistics.median) for side in ("shared", "twice")]
        gains = [f"{row['part']:.0%}", f"{row['gained']:.2f}", f"{row['promised']:.2f}"]
        print(HEADINGS.format(prompt, response, *gains, *times, f"{row['gradients_off']:.1e}"), flush=True)
    print(f"aim: {AIM:.0%} of what is promised; gradients within {SAME:.0e}")
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "cores": os.cpu_count(), "rows": result}, indent=1))
    return int(max(row["gradients_off"] for row in result) > SAME)


if __name__ == "__main__":
    sys.exit(main())
