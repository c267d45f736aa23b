"""A GRPO update whose groups share their prompt in a row, against one with a row for each completion.

    python benchmarks/shared_prompts.py [--prompt 1024] [--completion 256] [--generations 8]

Both sides are steps of one program over the same completions, LoRA, interleaved; completions have all their tokens.
Prints the ratio of the medians, and of the tokens that go through the layers.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Reward, Schedule, Weights, compile
from nnxdsl.data.batch import GroupBatch, RolloutBatch, token_count
from nnxdsl.program.compile import Program


def batches(prompt: int, completion: int, generations: int, vocab_size: int) -> tuple[GroupBatch, RolloutBatch]:
    """The completions of one prompt in one row, and in rows of their own."""
    draw = np.random.default_rng(0)
    prompts = np.repeat(draw.integers(1, vocab_size, (1, prompt), np.int32), generations, axis=0)
    ids = draw.integers(1, vocab_size, (generations, completion), np.int32)
    mask, weight = np.ones(ids.shape, bool), np.ones(generations, np.float32)
    advantages = np.repeat(draw.normal(size=(generations, 1)), completion, axis=1).astype(np.float32)
    length, limit = np.full(generations, prompt + completion, np.int32), weight * completion
    lengths = np.full(generations, completion, np.int32)
    alone = RolloutBatch(np.concatenate([prompts, ids], axis=1), length, ids, lengths, mask, weight, advantages, limit)
    arrays = (ids, lengths, mask, weight, advantages, limit)
    return GroupBatch(prompts[:1], np.array([prompt], np.int32), *(x[None] for x in arrays)), alone


def program(model: str, size: str, prompt: int, completion: int, generations: int) -> Program:
    """A GRPO program of one group a step."""
    return compile(
        Experiment(
            name="shared-prompts",
            model=getattr(Model, model)(size, weights=Weights.Random()),
            adapter=Adapter.LoRA(rank=8),
            objective=Objective.GRPO(rewards=(Reward("exact_answer"),), num_generations=generations, beta=0.0),
            data=Data.Prompts("none.jsonl", max_prompt_length=prompt, max_completion_length=completion),
            optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
            batch_size=generations,
            steps=1,
        )
    )


def main() -> None:
    """Measure and print, ratios first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama3", help="family of the model")
    parser.add_argument("--size", default="tiny", help="its size")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--generations", type=int, default=8, help="completions of the prompt")
    parser.add_argument("--repeat", type=int, default=5, help="steps of each side, in turn")
    options = parser.parse_args()
    made = program(options.model, options.size, options.prompt, options.completion, options.generations)
    vocab_size = made.blueprint.config.vocab_size
    sides = batches(options.prompt, options.completion, options.generations, vocab_size)
    state, took = made.init(), {0: list[float](), 1: list[float]()}
    for turn in range(options.repeat + 1):
        for side, batch in enumerate(sides):
            start = time.perf_counter()
            state, metrics = made.step(state, made.shard_batch(batch))
            jax.block_until_ready(metrics)
            if turn:  # the first compiles
                took[side].append(time.perf_counter() - start)
    shared, alone = (statistics.median(took[side]) for side in (0, 1))
    tokens = [int(token_count(batch)) for batch in sides]
    print(f"time {shared / alone:.3f}: {shared:.2f} s against {alone:.2f} s")
    print(f"tokens {tokens[0] / tokens[1]:.3f}: {tokens[0]:,} against {tokens[1]:,}")


if __name__ == "__main__":
    main()
