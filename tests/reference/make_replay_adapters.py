"""Stores the first values of LoRA's A for the replay, under transformers' names: the second command of make_replay.py.

A is drawn from jax's generator by seed and path, which torch cannot do again. Shapes are `[in, rank]`, float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "packages"))

from small_lab.model import Small  # noqa: E402

from nnxdsl import Adapter, Data, Experiment, Objective, Optimizer, Schedule, Weights, compile  # noqa: E402

THEIRS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def main() -> None:
    """Writes tests/reference/replay/adapters.npz."""
    experiment = Experiment(
        name="replay",
        model=Small(vocab_size=320, pattern=2, weights=Weights.HF(str(HERE / "replay" / "model"))),
        data=Data.Preferences("pairs.jsonl", max_prompt_length=16, max_completion_length=16),
        objective=Objective.DPO(),
        adapter=Adapter.LoRA(rank=3, alpha=6.0),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=4,
        steps=10,
    )
    program = compile(experiment)
    pattern = program.blueprint.config.layers.period
    result: dict[str, np.ndarray] = {}
    for path, leaf in program.init().trainable.items():
        if path.endswith("_lora_a"):
            stack, _, block, _, layer, _ = path.split(".")
            parts = np.asarray(leaf) if stack == "layers" else np.asarray(leaf)[None]
            for number, part in enumerate(parts):
                first = program.blueprint.config.layers.periods * pattern if stack == "tail" else number * pattern
                result[f"model.layers.{first + int(block)}.{THEIRS[layer]}"] = part
    np.savez(HERE / "replay" / "adapters.npz", **result)


if __name__ == "__main__":
    main()
