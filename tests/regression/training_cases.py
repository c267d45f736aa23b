"""Ten steps of small experiments: objectives x adapters x quantization x batching x meshes x optimizers x families.

Each case is one experiment, which the command line runs as a user's; its metrics, samples and last checkpoint are read
from the files of its run. One line of a table is one case, so that a renamed field is changed in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import batches
import numpy as np
import results
from commands import command, newest_checkpoint, run
from results import Result

from nnxdsl import (
    Adapter,
    Batching,
    Checkpoint,
    Data,
    Distance,
    Divergence,
    Evaluation,
    Experiment,
    Guard,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    Precision,
    Quantization,
    Reference,
    Reward,
    Schedule,
    Tokenizer,
    Weights,
)

TIMINGS = ("/s", "step", "attempt", "peak_memory_gib", "mfu", "hfu", "seconds")
"""Ends of the names of fields that are no results of a step."""

BYTES = Tokenizer.Bytes()
MODEL = Model.HF("model", weights=Weights.HF("model"), tokenizer=BYTES)
TEACHER = Model.HF("teacher", weights=Weights.HF("teacher"), tokenizer=BYTES)
PAIRS = Data.Preferences("pairs.jsonl", max_prompt_length=24, max_completion_length=16)
FEEDBACK = Data.Feedback("feedback.jsonl", max_prompt_length=24, max_completion_length=16)
PROMPTS = Data.Prompts("prompts.jsonl", max_prompt_length=16, max_completion_length=8)
TEXT = Data.Text("texts.jsonl", max_length=32)
CHATS = Data.Conversations("chats.jsonl", max_length=48)
SGD = Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=1.0)
COSINE = Schedule.WarmupCosine(peak_lr=4e-3, warmup_ratio=0.2, final_ratio=0.1)
# A large eps: elements whose gradient is rounding alone must not be moved as far as all others.
ADAMW = Optimizer.AdamW(schedule=COSINE, weight_decay=0.1, eps=1e-4)
LORA = Adapter.LoRA(rank=2, alpha=4.0)
DORA = Adapter.DoRA(rank=2, alpha=4.0)
ONLINE = Memory(reference="online")
PACKED = Batching.Packed(length=64)  # rows of one length: fewer programs are compiled
EIGHT = Mesh(data=2, fsdp=2, tensor=2)
GROUPS: dict[str, Any] = {"rewards": (Reward("remainder"), Reward("brevity", weight=0.5)), "num_generations": 4}
ALL = Objective.SFT(loss_on="all")


def tiny(family: str, **fields: Any) -> dict[str, Any]:
    """A built-in family with random weights, trained by supervised fine-tuning."""
    objective = ALL if not fields.get("mtp_layers") else Objective.SFT(loss_on="all", mtp_loss_weight=0.3)
    return {"model": getattr(Model, family)("tiny", **fields), "objective": objective, "optimizer": ADAMW}


def of_ids(
    family: str, router_aux_loss_coef: float = 0.0, indexer_loss_coef: float = 0.0, **fields: Any
) -> dict[str, Any]:
    """A stored model of a family, trained on pairs of token ids."""
    path = f"families/{family}"
    losses = {"router_aux_loss_coef": router_aux_loss_coef, "indexer_loss_coef": indexer_loss_coef}
    model = Model.HF(path, weights=Weights.HF(path), tokenizer=Tokenizer.File("tokenizer"), **losses)
    data = Data.Preferences("pairs_of_ids.jsonl", max_prompt_length=16, max_completion_length=16)
    return {"model": model, "data": data, "objective": Objective.DPO(beta=0.5), **fields}


TABLE: dict[str, Callable[[], dict[str, Any]]] = {
    # -- objectives, with every way of training among them
    "sft": lambda: {"objective": Objective.SFT(loss_on="all", z_loss=1e-3)},
    "sft-chats-lora-packed": lambda: {
        "objective": Objective.SFT(),
        "data": CHATS,
        "adapter": LORA,
        "batching": PACKED,
    },
    "sft-packed-microbatch": lambda: {"objective": ALL, "batching": PACKED, "microbatch_size": 4},
    "dpo": lambda: {"objective": Objective.DPO(beta=0.5)},
    "dpo-lora-online": lambda: {"objective": Objective.DPO(beta=0.5), "adapter": LORA, "memory": ONLINE},
    "dpo-js-smoothed": lambda: {
        "objective": Objective.DPO(beta=0.5, label_smoothing=0.1, divergence=Divergence.JensenShannon()),
        "adapter": LORA,
    },
    "dpo-tail-wpo-packed": lambda: {
        "objective": Objective.DPO(beta=0.5, ld_alpha=0.4, weighting="wpo"),
        "batching": PACKED,
    },
    "robust-dora": lambda: {"objective": Objective.RobustDPO(beta=0.5), "adapter": DORA},
    "ipo-nf4": lambda: {
        "objective": Objective.IPO(divergence=Divergence.Alpha(alpha=0.4)),
        "adapter": LORA,
        "quantization": Quantization.NF4(block_size=8),
    },
    "hinge-int8": lambda: {
        "objective": Objective.Hinge(beta=0.5),
        "adapter": LORA,
        "quantization": Quantization.Int8(block_size=8),
    },
    "length-normalized-bucketed": lambda: {
        "objective": Objective.LengthNormalizedDPO(),
        "batching": Batching.Bucketed(buckets=3),
        "adapter": LORA,
    },
    "exo-microbatch": lambda: {"objective": Objective.EXO(beta=0.5), "microbatch_size": 2},
    "discopop-int4-dora": lambda: {
        "objective": Objective.DiscoPOP(beta=0.5, divergence=Divergence.ForwardKL()),
        "adapter": DORA,
        "quantization": Quantization.Int4(block_size=8),
    },
    "nca": lambda: {"objective": Objective.NCA(beta=0.5), "adapter": LORA},
    "bco-whole": lambda: {
        "objective": Objective.BCO(beta=0.5, shift="batch"),
        "microbatch_size": 4,
        "memory": ONLINE,
    },
    "sppo": lambda: {"objective": Objective.SPPO(beta=0.1), "adapter": LORA},
    "apo-zero-fp8": lambda: {
        "objective": Objective.APOZero(beta=0.5),
        "adapter": LORA,
        "quantization": Quantization.FP8(block_size=8),
    },
    "apo-down": lambda: {"objective": Objective.APODown(beta=0.5), "adapter": LORA},
    "aot-whole": lambda: {"objective": Objective.AOT(beta=0.5), "microbatch_size": 4},
    "aot-unpaired-lora": lambda: {"objective": Objective.AOTUnpaired(beta=0.5), "adapter": LORA},
    "orpo": lambda: {"objective": Objective.ORPO(), "adapter": LORA},
    "simpo": lambda: {"objective": Objective.SimPO()},
    "cpo-microbatch": lambda: {"objective": Objective.CPO(), "microbatch_size": 4, "adapter": LORA},
    "sum": lambda: {
        "objective": Objective.Sum(
            terms=(Objective.DPO(), Objective.BCO(), Objective.ChosenSFT()), weights=(0.8, 0.2, 1.0)
        )
    },
    "kto-whole": lambda: {"objective": Objective.KTO(beta=0.5), "microbatch_size": 4, "adapter": LORA},
    "kto-packed": lambda: {"objective": Objective.KTO(beta=0.5, undesirable_weight=2.0), "batching": PACKED},
    "distill-jsd-features": lambda: {
        "objective": Objective.Distill(
            teacher=TEACHER, loss_on="all", distance=Distance.JSD(beta=0.3), feature_weight=0.5, temperature=2.0
        )
    },
    "distill-top-words": lambda: {
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all", hard_weight=0.2, top_k=8),
        "adapter": LORA,
    },
    "distill-top-words-packed": lambda: {
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all", distance=Distance.ReverseKL(), top_k=8),
        "batching": PACKED,
    },
    "grpo": lambda: {"objective": Objective.GRPO(**GROUPS), "adapter": LORA},
    "grpo-replayed": lambda: {
        "objective": Objective.DAPO(
            **GROUPS,
            num_iterations=2,
            beta=0.04,
            top_k=40,
            top_p=0.9,
            temperature=0.8,
            kl_estimator="k1",
        ),
        "microbatch_size": 4,
    },
    "grpo-by-length": lambda: {
        "objective": Objective.DrGRPO(**GROUPS),
        "adapter": DORA,
    },
    # -- references
    "reference-synced": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "reference": Reference.Synced(every_steps=3, ref_model_mixup_alpha=0.6),
        "adapter": LORA,
    },
    "reference-own-cached": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "reference": Reference.Checkpoint(Weights.HF("other")),
        "adapter": LORA,
    },
    "reference-own-online": lambda: {
        "objective": Objective.IPO(),
        "reference": Reference.Checkpoint(Weights.HF("other")),
        "memory": ONLINE,
    },
    "reference-uniform": lambda: {"objective": Objective.DPO(beta=0.5), "reference": Reference.Uniform()},
    # -- optimizers and schedules
    "adamw-bfloat16": lambda: {
        "objective": ALL,
        "optimizer": Optimizer.AdamW(
            schedule=Schedule.WSD(peak_lr=4e-3, warmup_ratio=0.2, decay_ratio=0.3),
            weight_decay=0.1,
            undecayed=("embed",),
            mu_dtype="bfloat16",
            eps=1e-4,
        ),
    },
    "muon": lambda: {
        "objective": ALL,
        "optimizer": Optimizer.Muon(schedule=Schedule.InverseSqrt(peak_lr=4e-3, warmup_steps=4), eps=1e-4),
    },
    "muon-qk-clip": lambda: {
        **tiny("Llama3"),
        "optimizer": Optimizer.Muon(schedule=COSINE, eps=1e-4, max_attention_logit=1.0),
        "microbatch_size": 4,
    },
    "lion-lora": lambda: {
        "objective": Objective.SimPO(),
        "adapter": LORA,
        "optimizer": Optimizer.Lion(schedule=Schedule.WarmupLinear(peak_lr=1e-3, warmup_ratio=0.2), weight_decay=0.1),
    },
    "adafactor-frozen": lambda: {
        "objective": ALL,
        "optimizer": Optimizer.Adafactor(schedule=COSINE, min_factored=8, weight_decay=0.1),
        "frozen": ("embed", "*norm"),
    },
    "sgd-momentum": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "optimizer": Optimizer.SGD(schedule=COSINE, momentum=0.9, max_grad_norm=None),
        "seed": 3,
    },
    # -- guards, workers, adapters, training in few bits
    "guard-skip": lambda: {"objective": Objective.SimPO(), "guard": Guard.Skip(), "adapter": LORA},
    "guard-spikes": lambda: {
        "objective": ALL,
        "guard": Guard.SkipSpikes(window=2, max_norm_ratio=1.01, max_in_a_row=10),
        "optimizer": ADAMW,
    },
    "diloco": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "outer": Outer.DiLoCo(workers=2, every_steps=3),
        "adapter": LORA,
        "optimizer": ADAMW,
    },
    "diloco-data2-fsdp2": lambda: {
        "objective": ALL,
        "outer": Outer.DiLoCo(workers=2, every_steps=4, lr=0.5),
        "mesh": Mesh(data=2, fsdp=2),
        "microbatch_size": 4,
    },
    "lora-dropout": lambda: {
        "objective": Objective.SimPO(),
        "adapter": Adapter.LoRA(rank=2, dropout=0.25, scaling="sqrt_rank", ranks=(("mlp.down", 4),)),
    },
    "dora-dropout-bucketed": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "adapter": Adapter.DoRA(rank=2, dropout=0.2, targets=("attention",), alphas=(("query", 2.0),)),
        "batching": Batching.Bucketed(buckets=2),
    },
    "lora-from-peft": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "adapter": Adapter.LoRA(rank=3, alpha=6.0, start=Weights.PEFT("adapter")),
    },
    "merged-weights": lambda: {
        "objective": Objective.SimPO(),
        "model": Model.HF(
            "model",
            weights=Weights.Merged(Weights.HF("model"), adapters=(Weights.PEFT("adapter"),), coefficients=(0.5,)),
            tokenizer=BYTES,
        ),
    },
    "training-qat": lambda: {
        "objective": ALL,
        "quantization": Quantization.QAT(weights="int4", activations="int8", block_size=8),
    },
    "training-int8": lambda: {"objective": ALL, "quantization": Quantization.Int8Training()},
    "training-fp8": lambda: {"objective": Objective.SimPO(), "quantization": Quantization.FP8Training()},
    # -- meshes of eight devices, and memory
    "mesh-fsdp4-tensor2-nf4": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "mesh": Mesh(fsdp=4, tensor=2),
        "adapter": LORA,
        "quantization": Quantization.NF4(block_size=8),
        "memory": ONLINE,
    },
    "mesh-eight-microbatch": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "mesh": EIGHT,
        "microbatch_size": 4,
        "optimizer": ADAMW,
    },
    "mesh-context-packed": lambda: {
        "objective": ALL,
        "mesh": Mesh(data=2, context=2, tensor=2),
        "batching": PACKED,
    },
    "mesh-kto-whole": lambda: {
        "objective": Objective.KTO(beta=0.5),
        "mesh": Mesh(data=2, fsdp=2),
        "microbatch_size": 4,
        "memory": ONLINE,
    },
    "mesh-grpo": lambda: {"objective": Objective.GRPO(**GROUPS), "mesh": Mesh(fsdp=2, tensor=2), "adapter": LORA},
    "mesh-distill-muon": lambda: {
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all"),
        "mesh": EIGHT,
        "optimizer": Optimizer.Muon(schedule=COSINE, eps=1e-4),
    },
    "mesh-stages": lambda: {**tiny("Qwen3MoE"), "mesh": Mesh(data=2, stage=4), "microbatch_size": 8, "batch_size": 16},
    "mesh-experts": lambda: {
        **tiny("Mixtral", router_aux_loss_coef=0.02),
        "mesh": Mesh(fsdp=2, expert=2, tensor=2),
        "microbatch_size": 4,
    },
    "remat-full-chunked": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "memory": Memory(remat="full", attention="chunked", logprob_tokens=16, reference="online"),
    },
    "remat-attention-dense": lambda: {
        "objective": ALL,
        "memory": Memory(remat="attention", attention="dense", logprob_tokens=8),
    },
    "compute-bfloat16": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "adapter": LORA,
        "precision": Precision(compute="bfloat16"),
    },
    "evaluated": lambda: {
        "objective": Objective.DPO(beta=0.5),
        "optimizer": ADAMW,
        "evaluation": Evaluation(
            every_steps=5,
            data=Data.Preferences("held_out_pairs.jsonl", max_prompt_length=24, max_completion_length=16),
            prompts=("a red fox", "why"),
            max_new_tokens=6,
            temperature=0.8,
            top_k=20,
        ),
    },
    # -- families: built in, with random weights; and stored ones with an adapter, on pairs
    "family-gemma": lambda: tiny("Gemma"),
    "family-gemma2": lambda: tiny("Gemma2"),
    "family-gemma3": lambda: tiny("Gemma3"),
    "family-llama3": lambda: tiny("Llama3"),
    "family-mistral": lambda: tiny("Mistral"),
    "family-mixtral": lambda: tiny("Mixtral", router_aux_loss_coef=0.02),
    "family-qwen2": lambda: tiny("Qwen2"),
    "family-qwen3": lambda: tiny("Qwen3"),
    "family-qwen3-moe": lambda: tiny("Qwen3MoE"),
    "family-gpt-oss": lambda: tiny("GPTOSS", router_aux_loss_coef=0.01),
    "family-olmo3": lambda: tiny("Olmo3"),
    "family-deepseek-mtp": lambda: tiny("DeepSeekV3", mtp_layers=1),
    "family-qwen3-next-mtp": lambda: tiny("Qwen3Next", mtp_layers=1, router_aux_loss_coef=0.01),
    "family-deepseek-router-whole": lambda: {
        **of_ids("deepseek_v3", router_aux_loss_coef=0.02, microbatch_size=4),
        "adapter": LORA,
    },
    "family-deepseek-indexer": lambda: of_ids("deepseek_v32", indexer_loss_coef=0.5, microbatch_size=4),
    "family-qwen3-next-packed": lambda: of_ids("qwen3_next", batching=PACKED, adapter=LORA),
    "family-gpt-oss-nf4": lambda: of_ids(
        "gpt_oss", adapter=LORA, quantization=Quantization.NF4(block_size=8, targets=("attention",))
    ),
}


def asked(name: str, fields: Mapping[str, Any]) -> Experiment:
    """The experiment of a line of the table."""
    data = {"pairs": PAIRS, "feedback": FEEDBACK, "prompts": PROMPTS, "sequences": TEXT}
    return Experiment(
        **{
            "name": name,
            "model": MODEL,
            "data": data[fields["objective"].batch_kind],
            "optimizer": SGD,
            "batch_size": 8,
            "steps": 10,
            "precision": Precision(compute="float32"),
            **fields,
        }
    )


def read(directory: Path) -> Result:
    """Metrics of every step, texts of samples, and what the last checkpoint of a run holds."""
    series: dict[str, list[float]] = {}
    for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            if isinstance(value, int | float) and not name.endswith(TIMINGS):
                series.setdefault(name, []).append(results.shortened(value))
    arrays = newest_checkpoint(directory)
    result: Result = {
        "series": series,
        "sums": {"trained arrays": results.magnitudes(_of(arrays, "trainable"))},
        "exact": {"shapes": results.sha(sorted(f"{np.asarray(x).dtype}{np.shape(x)}" for x in arrays.values()))},
        "bits": {"checkpoint": results.of_arrays(arrays.values())},
        "names": {"checkpoint": results.sha(sorted(arrays))},
    }
    samples = directory / "samples.jsonl"
    if samples.exists():
        rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        result["exact"]["samples"] = [{key: row[key] for key in row if key != "time"} for row in rows]
    return result


def _of(arrays: Mapping[str, Any], group: str) -> list[Any]:
    return [leaf for path, leaf in arrays.items() if path.startswith(group)]


def _train(name: str, fields: Callable[[], dict[str, Any]]) -> Callable[[], Result]:
    return lambda: read(run(asked(name, fields())))


def _resumed() -> Result:
    """A run that is stopped, and goes on: answers are drawn again, the state is read from its checkpoint."""
    objective = Objective.GRPO(rewards=(Reward("stopping"),), num_generations=4, num_iterations=2)
    fields = {"objective": objective, "optimizer": ADAMW, "checkpoint": Checkpoint(every_steps=4)}
    experiment = asked("resumed", fields)
    stopped = run(experiment)
    steps = len((stopped / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    command("resume", str(stopped), "--quiet", "--home", str(stopped.parent))
    result = read(stopped)
    result["exact"]["steps before the stop"] = steps
    return result


def _from_run() -> Result:
    """A run that starts where another one ends: from its checkpoint, and as its successor."""
    first = asked("first", {"objective": ALL, "steps": 4})
    directory = run(first)
    weights = Weights.Checkpoint(str(directory))
    second = asked("second", {"objective": ALL, "model": Model.HF("model", weights=weights, tokenizer=BYTES)})
    third = asked(
        "third",
        {
            "objective": Objective.DPO(beta=0.5),
            "adapter": LORA,
            "model": Model.HF("model", weights=Weights.From(first), tokenizer=BYTES),
        },
    )
    parts = {"second": read(run(second)), "third": read(run(third))}
    result: Result = {}
    for name, ours in parts.items():
        for part, values in ours.items():
            result.setdefault(part, {}).update({f"{name}: {key}": value for key, value in values.items()})
    return result


API: dict[str, Callable[[], Result]] = {
    "api-dpo-precomputed": lambda: batches.steps(
        asked("api", {"objective": Objective.DPO(beta=0.5), "adapter": LORA}), is_precomputed=True
    ),
    "api-sft-packed-eight": lambda: batches.steps(
        asked("api", {"objective": ALL, "mesh": EIGHT, "batching": PACKED, "optimizer": ADAMW})
    ),
}
"""The compiled program, used without a run."""


CASES: dict[str, Callable[[], Result]] = {
    **{name: _train(name, fields) for name, fields in TABLE.items()},
    **API,
    "resumed": _resumed,
    "from-run": _from_run,
}
