"""What nnxdsl does with one GPU: steps, memory and answers of models from 1B to 8B, random weights.

`python benchmarks/gpu.py` takes one process for each job, so that its peak of memory is its own, and one that fails
fails alone. `--tiny` runs everything on small models, on any device, to see that it works. `--set path=value ...`
changes the experiments, such as `--set microbatch_size=4 memory.remat=full`, where a job's own choice does not suit.

The share of the peak (MFU) is of the FLOPs that a step's mathematics takes at least (`nnxdsl/planning/flops.py`), over
the device's published peak, and over what a product of large matrices reaches here (`measured`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Memory, Model, Objective, Optimizer, Quantization, Schedule
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.planning import flops
from nnxdsl.planning.plan import plan
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.compile import Program
from nnxdsl.sharding import hardware

GEMMA, LLAMA1, LLAMA3, LLAMA8 = (
    Model.Gemma3("1b"),
    Model.Llama3("1b"),
    Model.Llama3("3b"),
    Model.Llama3("8b"),
)
TINY = {GEMMA: Model.Gemma3("tiny")} | dict.fromkeys((LLAMA1, LLAMA3, LLAMA8), Model.Llama3("tiny"))


@attrs.frozen(kw_only=True)
class Job:
    """One measurement.

    Attributes:
        model: The network.
        kind: "dpo" and "sft" take steps, "decode" answers.
        lora: Adapters are trained, and not all weights.
        quantization: Of frozen weights, or of the products of trained ones (`FP8Training`).
        reference: When it is asked.
        lengths: Tokens of a prompt and a completion, or of a sequence, or of prompt and answer for "decode".
        rows: Of a step, or that are answered at a time.
        at_once: Of these, computed at one time.
        aim: What it should reach, in words.
    """

    model: Model
    kind: Literal["dpo", "sft", "decode"]
    lora: bool = True
    quantization: Quantization | None = None
    reference: Literal["cached", "online"] = "cached"
    lengths: tuple[int, ...] = (512, 256)
    rows: int
    at_once: int
    aim: str = ""

    def smaller(self) -> Job:
        """The same of a tiny model."""
        lengths = tuple(max(length // 32, 8) for length in self.lengths)
        rows, at_once = min(self.rows, 4), min(self.at_once, 2)
        return attrs.evolve(self, model=TINY[self.model], lengths=lengths, rows=rows, at_once=at_once)

    @property
    def experiment(self) -> Experiment:
        """What takes its steps."""
        longest = sum(self.lengths)
        return Experiment(
            name="gpu",
            model=self.model,
            adapter=Adapter.LoRA(rank=16) if self.lora else None,
            quantization=self.quantization,
            objective=Objective.SFT(loss_on="all") if self.kind == "sft" else Objective.DPO(),
            data=Data.Text("none.jsonl", max_length=longest)
            if self.kind == "sft"
            else Data.Preferences(
                "none.jsonl", max_prompt_length=self.lengths[0], max_completion_length=self.lengths[-1]
            ),
            optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
            batch_size=self.rows,
            microbatch_size=self.at_once,
            steps=1_000,
            memory=Memory() if self.kind == "sft" else Memory(reference=self.reference),
        )


def _dpo(model: Model, rows: int, at_once: int, reference: Literal["cached", "online"], aim: str = "") -> Job:
    return Job(model=model, kind="dpo", rows=rows, at_once=at_once, reference=reference, aim=aim)


JOBS = {
    "dpo-gemma-1b": _dpo(GEMMA, 64, 16, "cached", "50 % of the measured peak"),
    "dpo-gemma-1b-online": _dpo(GEMMA, 64, 16, "online"),
    "dpo-llama-1b": _dpo(LLAMA1, 64, 16, "cached", "50 % of the measured peak"),
    "dpo-llama-1b-online": _dpo(LLAMA1, 64, 16, "online"),
    "dpo-llama-3b": _dpo(LLAMA3, 32, 16, "cached"),
    "dpo-llama-8b": _dpo(LLAMA8, 32, 8, "cached", "60 % of the measured peak"),
    "dpo-llama-8b-online": _dpo(LLAMA8, 32, 8, "online"),
    "sft-llama-8b": Job(model=LLAMA8, kind="sft", lengths=(4096,), rows=8, at_once=2, aim="15,500 tokens/s"),
    "sft-gemma-1b-full": Job(model=GEMMA, kind="sft", lora=False, lengths=(2048,), rows=32, at_once=8),
    "memory-llama-8b": Job(model=LLAMA8, kind="dpo", rows=1, at_once=1, aim="at most 16.5 GiB"),
    "memory-llama-8b-nf4": Job(
        model=LLAMA8,
        kind="dpo",
        quantization=Quantization.NF4(block_size=64),
        rows=1,
        at_once=1,
        aim="at most 7 GiB",
    ),
    "sft-gemma-1b-full-fp8": Job(
        model=GEMMA,
        kind="sft",
        lora=False,
        quantization=Quantization.FP8Training(),
        lengths=(2048,),
        rows=32,
        at_once=8,
        aim="faster than sft-gemma-1b-full, the same in bfloat16",
    ),
    "decode-llama-8b": Job(
        model=LLAMA8, kind="decode", lengths=(64, 256), rows=1, at_once=1, aim="70 % of the bandwidth"
    ),
    "decode-llama-8b-16": Job(model=LLAMA8, kind="decode", lengths=(64, 256), rows=16, at_once=16),
}
"""By name."""


class Repeated:
    """Weights that are one block of random numbers again and again: they differ, and are drawn in no time."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._shapes = {path: leaf.shape for path, leaf in blueprint.base.items()}
        self._block = 0.02 * np.random.default_rng(0).standard_normal(2**22 + 1, np.float32)

    def leaf(self, path: str) -> np.ndarray:
        """The weight of one path, float32."""
        shape = self._shapes[path]
        return np.ones(shape, np.float32) if path.endswith("scale") else np.resize(self._block, shape)


def rows(experiment: Experiment, job: Job) -> PairBatch | SequenceBatch:
    """A batch without padding; with a reference's words where they are kept."""
    draw, count = np.random.default_rng(0), job.rows

    def ids(length: int) -> np.ndarray:
        return draw.integers(1, 256, (count, length)).astype(np.int32)

    weight = np.ones(count, np.float32)
    if job.kind == "sft":
        tokens = ids(job.lengths[0])
        mask = np.ones(tokens.shape, bool)
        mask[:, 0] = False
        return SequenceBatch(tokens, np.full(count, tokens.shape[1], np.int32), mask, weight)
    sizes = (job.lengths[0], job.lengths[1], job.lengths[1])
    known = np.zeros((2, count), np.float32) if job.reference == "cached" else (None, None)
    return PairBatch(*map(ids, sizes), *(np.full(count, size, np.int32) for size in sizes), weight, *known)


def measured_peak(size: int) -> float:
    """FLOP/s of a bfloat16 product of square matrices, the best of ten."""
    one = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x, y: x @ y)
    taken = [_timed(lambda: product(one, one)) for _ in range(11)]
    return 2 * size**3 / min(taken[1:])


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def peak_bytes() -> int | None:
    """The most that this process has had on its device; None where the device does not tell."""
    reported = jax.local_devices()[0].memory_stats()
    return None if reported is None else reported["peak_bytes_in_use"]


def take_steps(job: Job, experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Times, rates and memory of steps."""
    program = nnxdsl.compile(experiment)
    batch = rows(experiment, job)
    state = program.init(Repeated(program.blueprint))
    placed, taken, loss = peak_bytes(), [], math.nan
    inputs = program.shard_batch(batch)
    for _ in range(rounds + 2):  # the first compiles, the second allocates
        start = time.perf_counter()
        state, metrics = program.step(state, inputs)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - start)
        loss = float(metrics["loss"])
    work, tokens = flops.work(program.blueprint, batch), float(metrics["num_tokens"])
    quickest = min(taken[2:])
    return {
        "seconds": taken[2:],
        "first_step": taken[0],
        "rows_per_second": job.rows / quickest,
        "tokens_per_second": tokens / quickest,
        "fewest_flops": work.model_flops,
        "executed_flops": work.executed,
        "floor_flops_per_second": work.model_flops / quickest,
        "executed_flops_per_second": work.executed / quickest,
        "loss": loss,
        "placed_bytes": placed,
        "peak_bytes": peak_bytes(),
        "remat": program.blueprint.remat,
        **planned(experiment),
    }


def planned(experiment: Experiment) -> dict[str, Any]:
    """What the plan says of the device's memory."""
    device = jax.local_devices()[0]
    reported = plan(experiment, device.platform, hardware.of_kind(device.device_kind))
    return {"planned_bytes": reported["bytes_per_device"], "planned_step": reported["step_seconds"]}


def answer(job: Job, experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Time of one more token of greedy answers, from answers of two lengths."""
    program = nnxdsl.compile(experiment)
    state = program.init(Repeated(program.blueprint))
    template, leaves = program.policy(state)
    blueprint = program.blueprint
    sampler = Sampler(template, blueprint.config, blueprint.compute, ())
    prompts = np.random.default_rng(0).integers(1, 256, (job.rows, job.lengths[0])).tolist()
    longer, shorter = job.lengths[1], max(job.lengths[1] // 4, 2)
    taken: dict[int, list[float]] = {longer: [], shorter: []}
    for turn in range(rounds + 1):
        for new, times in taken.items():
            start = time.perf_counter()
            sampler(leaves, prompts, Sampling(max_new_tokens=new))
            if turn:
                times.append(time.perf_counter() - start)
    token = (min(taken[longer]) - min(taken[shorter])) / (longer - shorter)
    return {
        "seconds": taken[longer],
        "seconds_per_token": token,
        "tokens_per_second": job.rows / token,
        "read_bytes": read_bytes(program, leaves, job),
        "peak_bytes": peak_bytes(),
    }


def read_bytes(program: Program, leaves: dict[str, jax.Array], job: Job) -> int:
    """What one more token reads at least: all weights, of an embedding that is no head its rows alone; the cache."""
    config, of = program.blueprint.config, program.blueprint.head_path
    table = 0 if of == "embed.embedding" else leaves["embed.embedding"].nbytes
    weights = sum(leaf.nbytes for leaf in leaves.values()) - table
    slots = job.lengths[0] + job.lengths[1] // 2
    each = 2 * config.layers.num_layers * config.num_kv_heads * config.head_dim * program.blueprint.compute.itemsize
    return weights + job.rows * slots * each


def child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One job in this process."""
    job = JOBS[name].smaller() if options.tiny else JOBS[name]
    experiment = nnxdsl.evolve(job.experiment, dict(word.split("=", 1) for word in options.set))
    device = jax.local_devices()[0]
    known = hardware.of_kind(device.device_kind)
    about = {
        "job": name,
        "aim": job.aim,
        "device": device.device_kind,
        "published_flops": known and known.flops,
        "bandwidth": known and known.bandwidth,
        "measured_flops": measured_peak(256 if options.tiny else 8192),
        "lengths": job.lengths,
        "rows": job.rows,
        "at_once": experiment.rows_at_once,
    }
    done = (answer if job.kind == "decode" else take_steps)(job, experiment, options.rounds)
    return about | done


def lines(reported: dict[str, Any]) -> list[str]:
    """What people read of a job."""
    result = [f"{reported['job']} on {reported['device']}" + (f"; aim: {reported['aim']}" if reported["aim"] else "")]
    times = f"minimum {min(reported['seconds']):.4f} s, median {statistics.median(reported['seconds']):.4f} s"
    if "seconds_per_token" in reported:
        result.append(
            f"  {reported['tokens_per_second']:,.1f} tokens/s, {1e3 * reported['seconds_per_token']:.2f} ms a token"
        )
        if reported["bandwidth"]:
            least = reported["read_bytes"] / reported["bandwidth"]
            result.append(f"  {least / reported['seconds_per_token']:.0%} of what the bandwidth allows")
        return [*result, f"  whole answers: {times}"]
    rate = reported["floor_flops_per_second"]
    peak = reported["measured_flops"]
    share = f"{rate / peak:.1%} of the measured peak ({peak / 1e12:.3g} TFLOP/s)"
    if reported["published_flops"]:
        hfu = reported["executed_flops_per_second"] / reported["published_flops"]
        share += f", MFU {rate / reported['published_flops']:.1%}, HFU {hfu:.1%}"
    result.append(f"  {share}")
    result.append(
        f"  {reported['rows_per_second']:.2f} samples/s, {reported['tokens_per_second']:,.0f} tokens/s; a step: {times}"
    )
    result.append(
        f"  first step {reported['first_step']:.1f} s; {reported['at_once']} rows at once, remat {reported['remat']}"
    )
    plan_said = f"  memory: planned {reported['planned_bytes'] / 2**30:.2f} GiB"
    if reported["peak_bytes"] is None:
        return [*result, f"{plan_said}; this device does not tell its peak"]
    off = reported["planned_bytes"] / reported["peak_bytes"] - 1
    return [
        *result,
        f"{plan_said}, real peak {reported['peak_bytes'] / 2**30:.2f} GiB, the plan is {off:+.1%} off (aim 5 %)",
    ]


def main() -> int:
    """All jobs, or one in this process; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--tiny", action="store_true", help="small models, on any device")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each job")
    parser.add_argument("--set", nargs="*", default=[], help="changes of the experiments, path=value")
    parser.add_argument("--json", type=Path, help="where all figures go as well")
    parser.add_argument("--child", choices=tuple(JOBS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options)))
        return 0
    names = ("jax", "jaxlib", "flax", "qwix")
    versions = {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    reported, failed = [], {}
    flags = ["--rounds", str(options.rounds), *(["--tiny"] if options.tiny else []), "--set", *options.set]
    for name in options.jobs:
        argv = [sys.executable, __file__, "--child", name, *flags]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            failed[name] = "\n".join(done.stderr.splitlines()[-3:])
            print(f"{name} failed: {failed[name]}", flush=True)
            continue
        reported.append(json.loads(done.stdout.splitlines()[-1]))
        print("\n".join(lines(reported[-1])), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "jobs": reported, "failed": failed}, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
