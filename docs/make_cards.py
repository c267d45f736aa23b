"""Writes the tables of docs/guides/which_card.md: what `plan` says of models, methods and cards, and what was measured.

`python docs/make_cards.py` takes a minute and no device; tests/test_card_page.py compares the page with it.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnxdsl import Adapter, Data, Experiment, Mesh, Model, Objective, Optimizer, Quantization, Schedule
from nnxdsl.planning.plan import plan
from nnxdsl.sharding import hardware

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "which_card.md"
TOKENS, ROWS = 2048, 16
"""Tokens of a sequence, and sequences of a step: at least, on more cards than that one for each."""

MODELS = {
    "Llama 3 1B": Model.Llama3("1b"),
    "Gemma 3 4B": Model.Gemma3("4b"),
    "Llama 3 8B": Model.Llama3("8b"),
    "Qwen3 14B": Model.Qwen3("14b"),
    "Qwen3 32B": Model.Qwen3("32b"),
    "Llama 3 70B": Model.Llama3("70b"),
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"adapter": Adapter.LoRA(rank=16)},
    "QLoRA NF4": {"adapter": Adapter.LoRA(rank=16), "quantization": Quantization.NF4()},
}
CARDS = {"rtx4090": "RTX 4090", "a100-40": "A100 40GB", "l40s": "L40S", "h100": "H100", "h200": "H200", "b200": "B200"}
"""By memory; an A100 of 80 GB holds what an H100 does."""
COUNTS = (2, 4, 8, 16, 32)
JOBS = {
    "dpo-gemma-1b": "Gemma 3 1B, LoRA DPO",
    "sft-gemma-1b-full": "Gemma 3 1B, full SFT",
    "dpo-llama-1b": "Llama 3 1B, LoRA DPO",
    "dpo-llama-8b": "Llama 3 8B, LoRA DPO",
    "dpo-llama-8b-online": "Llama 3 8B, LoRA DPO, online reference",
    "sft-llama-8b": "Llama 3 8B, LoRA SFT, 4,096 tokens",
    "memory-llama-8b": "Llama 3 8B, LoRA DPO, one pair",
}
"""Jobs of benchmarks/gpu.py that ran on an H100 with settings of their own."""


def experiment(model: Model, method: str, cards: int = 1) -> Experiment:
    """SFT of a model, one sequence at a time on each card."""
    return Experiment(
        name="card",
        model=model,
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text("none.jsonl", max_length=TOKENS),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
        batch_size=max(ROWS, cards),
        microbatch_size=cards,
        steps=1_000,
        mesh=Mesh(fsdp=cards),
        **METHODS[method],
    )


def gib(report: dict[str, Any]) -> float:
    """What a plan says that a device has to hold."""
    return report["bytes_per_device"] / 2**30


def card_row(name: str, method: str) -> str:
    """The smallest card, or number of H100s, on which `plan` says that a model fits, and what it says of it there."""
    places = [*((card, 1) for card in CARDS), *(("h100", count) for count in COUNTS)]
    for card, count in places:
        asked = experiment(MODELS[name], method, count)
        result = plan(asked, "gpu", hardware.device(card))
        if result["verdict"]["fits"]:
            break
    else:
        raise AssertionError(f"{name}, {method}: fits nowhere")
    speed = asked.batch_size * TOKENS / result["step_seconds"]["step"]
    where = CARDS[card] if count == 1 else f"{count} x {CARDS[card]}"
    return f"| {name} | {method} | {where} | {gib(result):.1f} | {result['remat']} | {speed:,.0f} |"


def cards_table() -> Iterator[str]:
    """A row for each model and method."""
    yield "| model | method | smallest that fits | GiB of each card | remat | tokens/s, estimated |"
    yield "|---|---|---|--:|---|--:|"
    for name in MODELS:
        for method in METHODS:
            yield card_row(name, method)


def measured_table() -> Iterator[str]:
    """What `plan` says of jobs that ran on an H100, beside what benchmarks/README.md has of them."""
    jobs = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))["JOBS"]
    recorded = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    yield "| job | planned GiB | measured GiB | estimated s/step | measured s/step |"
    yield "|---|--:|--:|--:|--:|"
    for job, name in JOBS.items():
        row = re.search(rf"^\| `{job}` \| ([\d.]+) s \|.* and ([\d.]+) GiB", recorded, re.MULTILINE)
        assert row is not None, job
        result = plan(jobs[job].experiment, "gpu", hardware.device("h100"))
        yield f"| {name} | {gib(result):.1f} | {row[2]} | {result['step_seconds']['step']:.3f} | {row[1]} |"


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for lines in (cards_table(), measured_table()):
        first = next(lines)
        table = "\n".join([first, *lines]) + "\n"
        text, times = re.subn(rf"{re.escape(first)}\n(?:\|.*\n)*", lambda _, table=table: table, text)
        assert times == 1, first
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
