"""Plans of real models on devices that are not there: figures, shardings of every array, and layouts as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import results
from commands import command, write
from results import Result
from training_cases import LORA, asked

from nnxdsl import (
    Adapter,
    Batching,
    Data,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    Precision,
    Quantization,
    Schedule,
    Tokenizer,
)

PAIRS = Data.Preferences("pairs.jsonl", max_prompt_length=512, max_completion_length=512)
TEXT = Data.Text("texts.jsonl", max_length=1024)
BFLOAT16 = Precision(compute="bfloat16")
QLORA: dict[str, Any] = {"adapter": Adapter.LoRA(rank=16), "quantization": Quantization.NF4(block_size=64)}
MUON = Optimizer.Muon(schedule=Schedule.WSD(peak_lr=1e-4))
LARGE = 64
"""Of a section with more numbers than these, their count and sum are recorded, and a digest of all."""

TABLE: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "plan-gemma3-h200": (
        lambda: {"model": Model.Gemma3("1b"), "objective": Objective.DPO(), "mesh": Mesh(fsdp=8), **QLORA},
        ("--device", "h200"),
    ),
    "plan-gemma3-12b-v5e": (
        lambda: {
            "model": Model.Gemma3("12b"),
            "objective": Objective.DPO(),
            "mesh": Mesh(fsdp=16, tensor=2),
            "adapter": LORA,
            "memory": Memory(reference="online"),
            "batch_size": 32,
        },
        ("--device", "v5e"),
    ),
    "plan-llama3-8b-stages": (
        lambda: {
            "model": Model.Llama3("8b"),
            "objective": Objective.SFT(loss_on="all"),
            "mesh": Mesh(data=2, stage=4, tensor=2),
            "microbatch_size": 16,
            "batch_size": 32,
            "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
            "memory": Memory(remat="inputs", attention="dense"),
        },
        ("--device", "h100"),
    ),
    "plan-mixtral-experts": (
        lambda: {
            "model": Model.Mixtral("8x7b", router_aux_loss_coef=0.02),
            "objective": Objective.SFT(loss_on="all"),
            "mesh": Mesh(fsdp=4, expert=8, slices=2),
            "batch_size": 64,
            "optimizer": MUON,
        },
        ("--device", "h200"),
    ),
    "plan-deepseek-tiny-tensor": (
        lambda: {
            "model": Model.DeepSeekV3("tiny", mtp_layers=1),
            "objective": Objective.SFT(loss_on="all", mtp_loss_weight=0.3),
            "mesh": Mesh(data=2, tensor=2, context=2),
            "batching": Batching.Packed(),
            "optimizer": Optimizer.Adafactor(schedule=Schedule.Constant(lr=1e-4)),
        },
        (),
    ),
    "plan-qwen3-next-v6e": (
        lambda: {
            "model": Model.Qwen3Next("80b-a3b"),
            "objective": Objective.ORPO(),
            "mesh": Mesh(fsdp=8, expert=4),
            "adapter": LORA,
            "batch_size": 32,
        },
        ("--device", "v6e"),
    ),
    "plan-distill-offload": (
        lambda: {
            "model": Model.Qwen3("0.6b", tokenizer=Tokenizer.Bytes()),
            "objective": Objective.Distill(
                teacher=Model.Qwen3("4b", tokenizer=Tokenizer.Bytes()), loss_on="all", feature_weight=0.0
            ),
            "mesh": Mesh(fsdp=4),
            "memory": Memory(offload=("optimizer",)),
        },
        ("--device", "h200"),
    ),
    "plan-diloco-rules": (
        lambda: {
            "model": Model.Gemma2("2b"),
            "objective": Objective.DPO(beta=0.5),
            "mesh": Mesh(
                data=2,
                fsdp=2,
                tensor=2,
                rules=(("embed", "tensor"),),
                array_rules=(("*mlp*", (("mlp", None),)),),
                indivisible="replicate",
            ),
            "outer": Outer.DiLoCo(workers=2, every_steps=3),
            "batch_size": 16,
        },
        ("--device", "a100"),
    ),
}


def _scalars(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a JSON value, with its path; places in lists are not told apart."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _scalars(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from _scalars(each, f"{path}.*")
    else:
        yield path, value


def _plan(name: str, fields: Callable[[], dict[str, Any]], flags: tuple[str, ...]) -> Callable[[], Result]:
    def case() -> Result:
        ours = fields()
        data = PAIRS if ours["objective"].batch_kind == "pairs" else TEXT
        file = str(write(asked(name, {"data": data, "precision": BFLOAT16, **ours})))
        plan = json.loads(command("plan", file, "--json", *flags))
        dump = command("plan", file, "--dump", *flags).splitlines()
        result: Result = {"series": {}, "here": {}, "names": {}}
        for section, value in plan.items():
            leaves = list(_scalars(value))
            result["names"][section] = results.sha(sorted({path for path, _ in leaves}))
            result["here"][section] = results.sha(sorted(repr(each) for _, each in leaves if not isinstance(each, str)))
            figures = sorted(each for _, each in leaves if isinstance(each, int | float))
            if len(figures) > LARGE:
                figures = [len(figures), sum(figures)]
            if figures:
                result["series"][section] = [results.shortened(figure) for figure in figures]
        texts = sorted(each for path, each in _scalars(plan) if isinstance(each, str) and not path.startswith(".id"))
        result["names"]["all texts"] = results.sha(texts)
        placed = sorted(" ".join(line.split()[1:]) for line in dump if not line.startswith("#"))
        result["here"]["layout without paths"] = results.sha(placed)
        result["names"]["layout"] = results.sha(dump)
        return result

    return case


CASES: dict[str, Callable[[], Result]] = {name: _plan(name, *case) for name, case in TABLE.items()}
