"""A DPO step in Tunix's layout, written on nnxdsl's own decoder: what of the difference is the layout alone.

Each prompt stands once before each of its completions, rows are padded to the longest there may be, logits of every
position exist at one time, and the reference is asked at every step in a call of its own. It is no trainer of anybody:
it stands in for Tunix where that is not installed, and is named as what it is. `dpo_step.py` runs it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import optax
from side import Job, Turns, steps
from step_model import experiment

import nnxdsl
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.program.forward import Leaves


def main() -> None:
    """Steps of a job in that layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    turns, job = Turns(), Job(parser.parse_args().job)
    program = nnxdsl.compile(experiment(job.directory, job.numbers, "online"))
    first = program.init()
    forward, template = program.policy_loss.forward, program.policy_loss.policy
    update, beta, response = program.blueprint.update, job.numbers["beta"], job.numbers["response"]

    def logps(
        leaves: Leaves, tokens: jax.Array, places: TokenPositions, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Of chosen and rejected, each [B], from rows of both [2B, P + R]."""
        model = forward.model(template, leaves)
        hidden, *_ = model(tokens, places, dtype=forward.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, model.head())[:, -response - 1 : -1]
        inputs = jnp.take_along_axis(logits, tokens[:, -response:, None], axis=-1)[..., 0]
        each = jnp.sum((inputs - jax.nn.logsumexp(logits, axis=-1)) * mask, axis=-1)
        return each[: len(each) // 2], each[len(each) // 2 :]

    def loss(trainable: Leaves, frozen: Leaves, known: tuple[jax.Array, jax.Array], *rows: Any) -> jax.Array:
        chosen, rejected = logps({**frozen, **trainable}, *rows)
        return -jnp.mean(jax.nn.log_sigmoid(beta * ((chosen - known[0]) - (rejected - known[1]))))

    def move(
        trainable: Leaves, optimizer: Any, frozen: Leaves, known: Any, *rows: Any
    ) -> tuple[Leaves, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(trainable, frozen, known, *rows)
        updates, optimizer = update.update(gradients, optimizer, trainable)
        return optax.apply_updates(trainable, updates), optimizer, value  # pyright: ignore[reportReturnType]

    ask, step = jax.jit(logps), jax.jit(move, donate_argnums=(0, 1))
    reference = jax.tree.map(jnp.copy, {**first.frozen, **first.trainable})
    trainable, optimizer = first.trainable, first.optimizer
    count = len(job.pairs) // job.numbers["batch"]
    batches = [rows(job, number) for number in range(count)]

    def one(number: int) -> float:
        nonlocal trainable, optimizer
        inputs = batches[number % count]
        known = ask(reference, *inputs)
        trainable, optimizer, value = step(trainable, optimizer, first.frozen, known, *inputs)
        jax.block_until_ready((trainable, optimizer))
        return float(value)

    steps(turns, one)
    known = ask(reference, *batches[0])
    lowered = (
        ask.lower(reference, *batches[0]),
        step.lower(trainable, optimizer, first.frozen, known, *batches[0]),
    )
    turns.about = {
        "temporaries": max(one.compile().memory_analysis().temp_size_in_bytes for one in lowered),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "qwix")},
    }
    turns.close()


def rows(job: Job, step: int) -> tuple[jax.Array, TokenPositions, jax.Array]:
    """Tokens of both completions' rows, prompts before them; where they stand; which of the completions count."""
    batch = job.padded(step)

    def both(name: str) -> jax.Array:
        sides = (
            jnp.concatenate([batch[f"prompt{name}"], batch[f"{side}{name}"]], 1) for side in ("chosen", "rejected")
        )
        return jnp.concatenate(list(sides))

    mask = both("_mask")
    position = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
    places = TokenPositions(position, mask.astype(jnp.int32), jnp.zeros_like(position))
    return both(""), places, mask[:, -job.numbers["response"] :].astype(jnp.float32)


if __name__ == "__main__":
    main()
