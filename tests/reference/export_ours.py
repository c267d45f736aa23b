"""Exports what a small run learnt, for tests/reference/make_peft.py to load in transformers and PEFT.

    python tests/reference/export_ours.py Gemma3 DIRECTORY && python tests/reference/make_peft.py check DIRECTORY

A third word, `DoRA`, chooses another adapter than LoRA: with the scale of rsLoRA, and several ranks and alphas. With
`Reward` LoRA is that of a reward model, whose head is trained beside it.
It draws a model of the family's size "tiny", writes it to DIRECTORY/base, trains an adapter on it for a few steps of
DPO, and writes DIRECTORY/model, DIRECTORY/adapter, and expected.npz with the logits of the run's own model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Weights
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export, logits
from nnxdsl.weights.run_weights import RunWeights

TEXTS = ["Hi", "Grüße, 世界 🙂\n\t", "<bos>a<end_of_turn>\n", "".join(map(chr, range(1, 300)))]


def trained(experiment: Experiment, home: Path) -> Path:
    """The directory of an experiment's run."""
    return run(experiment, home, Display(quiet=True)).directory


ADAPTERS = {
    "LoRA": Adapter.LoRA(rank=4, alpha=8.0),
    "DoRA": Adapter.DoRA(
        rank=4, alpha=8.0, scaling="sqrt_rank", ranks=(("mlp.down", 6),), alphas=(("blocks.0.attention.query", 3.0),)
    ),
    "Reward": Adapter.LoRA(rank=4, alpha=8.0),
}


def main(family: str, place: Path, kind: str) -> None:
    """Writes everything."""
    place.mkdir(parents=True)
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(8)))
    pairs = [{"prompt": f"Say {n}: ", "chosen": "good", "rejected": "bad"} for n in range(8)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    model, optimizer = getattr(Model, family), Optimizer.AdamW(schedule=Schedule.Constant(lr=0.02))
    common = {"optimizer": optimizer, "batch_size": 4, "steps": 6}
    texts = Data.Text(str(place / "texts.jsonl"), max_length=16)
    first = Experiment(name="base", model=model("tiny"), objective=Objective.SFT(loss_on="all"), data=texts, **common)
    export(trained(first, place / "runs"), place / "base")
    weights = Weights.HF(str(place / "base"))
    second = Experiment(
        name="adapted",
        model=model("tiny", weights=weights),
        adapter=ADAPTERS[kind],
        objective=Objective.Reward() if kind == "Reward" else Objective.DPO(beta=0.2),
        data=Data.Preferences(str(place / "pairs.jsonl"), max_prompt_length=16, max_completion_length=8),
        **common,
    )
    directory = trained(second, place / "runs")
    for name, is_adapter in (("model", False), ("adapter", True)):
        done = export(directory, place / name, adapter=is_adapter)
        print(f"{name}: nnxdsl's own check: at most {done.difference:.3g} away")
    saved = RunWeights.open(directory)
    tokens = np.random.default_rng(1).integers(0, saved.config.vocab_size, (2, 100)).astype(np.int32)
    ours = logits(saved.policy, saved.policy_leaf, tokens)
    np.savez_compressed(place / "expected.npz", tokens=tokens, logits=ours)
    rows = [{"text": text, "ids": BytesTokenizer().encode(text)} for text in TEXTS]
    (place / "texts.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["LoRA"])[0])
