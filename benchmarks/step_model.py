"""The small Gemma 3 of the comparisons: its numbers, its experiment, and the directory that every side reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import attrs
import jax
import numpy as np
from side import ADAPTER, MODEL, NUMBERS, PAIRS

import nnxdsl
from nnxdsl import Adapter, Batching, Data, Experiment, Memory, Model, Objective, Optimizer, Order, Schedule, Weights
from nnxdsl.formats import hf
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.program import blueprint

CONFIG = GEMMA3["270m"].with_fields(
    {
        "layers.num_layers": 6,
        "embed_dim": 256,
        "mlp.dim": 1024,
        "head_dim": 64,
        "attention.query_scale": 64**-0.5,
        "vocab_size": 32_768,
        "max_length": 1024,
    }
)
"""Gemma 3 270M's proportions: four query heads, one of keys and values, a window of 512 in five layers of six."""

TARGETS = ("query", "output", "mlp")
"""Keys and values are left out: in Tunix's Gemma 3 they are one array, and share the A of one adapter."""

# Our module's name within a layer, and the Hub's.
_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@attrs.frozen(kw_only=True)
class Small(Model):
    """A Gemma 3 of `CONFIG`."""


@blueprint.architecture.register(Small)
def _(model: Small) -> DecoderConfig:
    return CONFIG


def experiment(
    directory: Path, numbers: dict[str, Any], reference: Literal["cached", "online"], *, random: bool = False
) -> Experiment:
    """A job's steps as nnxdsl takes them.

    Args:
        directory: The job.
        numbers: Of the job.
        reference: When the reference is asked.
        random: Weights are drawn, not read from the job.
    """
    return Experiment(
        name="step",
        model=Small(weights=Weights.Random() if random else Weights.HF(str(directory / MODEL))),
        adapter=Adapter.LoRA(rank=numbers["rank"], alpha=numbers["alpha"], targets=TARGETS)
        if numbers["lora"]
        else None,
        objective=Objective.DPO(beta=numbers["beta"]),
        data=Data.Preferences(
            str(directory / PAIRS),
            max_prompt_length=numbers["prompt"],
            max_completion_length=numbers["response"],
            order=Order.AsInFile(),
        ),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=numbers["learning_rate"]), max_grad_norm=None),
        batch_size=numbers["batch"],
        batching=Batching.Packed() if numbers["spread"] else Batching.Padded(),
        steps=1_000_000,
        seed=numbers["seed"],
        memory=Memory(reference=reference),
    )


def write(directory: Path, numbers: dict[str, Any], *, batches: int) -> None:
    """Writes a job.

    Args:
        directory: Is made if need be.
        numbers: See `side.Job`. Where lengths are spread, they are drawn as in `lengths`; else all rows are full.
        batches: How many there are before they begin again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / NUMBERS).write_text(json.dumps(numbers))
    draw = np.random.default_rng(numbers["seed"])
    with (directory / PAIRS).open("w") as file:
        for _ in range(batches * numbers["batch"]):
            prompt, *responses = lengths(draw, numbers) if numbers["spread"] else _full(numbers)
            row = {
                f"{name}_ids": draw.integers(1, CONFIG.vocab_size, length).tolist()
                for name, length in zip(("prompt", "chosen", "rejected"), (prompt, *responses), strict=True)
            }
            file.write(json.dumps(row) + "\n")
    samples = nnxdsl.compile(experiment(directory, {**numbers, "lora": False}, "cached", random=True))
    hf.write(directory / MODEL, CONFIG, samples.init().trainable)
    adapters: dict[str, np.ndarray] = {}
    if numbers["lora"]:
        adapters = _adapters(nnxdsl.compile(experiment(directory, numbers, "cached")).init().trainable)
    np.savez(directory / ADAPTER, **adapters)


def lengths(draw: np.random.Generator, numbers: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of a prompt and two completions, log-normal: medians of 3/8 and 1/2 of the longest, most below it.

    So are the lengths of collections of chats: many short rows, and a long tail, which is cut.
    """
    prompt = _log_normal(draw, 0.375 * numbers["prompt"], 0.8, numbers["prompt"])
    return (prompt, *(_log_normal(draw, 0.5 * numbers["response"], 0.6, numbers["response"]) for _ in range(2)))  # pyright: ignore[reportReturnType]


def _log_normal(draw: np.random.Generator, median: float, spread: float, longest: int) -> int:
    return int(np.clip(round(median * np.exp(spread * draw.standard_normal())), 4, longest))


def _full(numbers: dict[str, Any]) -> tuple[int, int, int]:
    return numbers["prompt"], numbers["response"], numbers["response"]


def _adapters(trainable: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """[in, rank] A of each module, by the Hub's name."""
    result: dict[str, np.ndarray] = {}
    for layer in range(CONFIG.layers.num_layers):
        period, place = divmod(layer, CONFIG.layers.period)
        for ours, theirs in _MODULES.items():
            leaf = trainable[f"layers.blocks.{place}.{ours}.kernel_lora_a"]
            result[f"model.layers.{layer}.{theirs}"] = np.asarray(leaf[period])
    return result
