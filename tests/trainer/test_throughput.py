"""Throughput metrics: rates by unit, utilisation where the peak is known."""

from __future__ import annotations

from pathlib import Path

import attrs
import jax

from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule, compile
from nnxdsl.planning.flops import Flops
from nnxdsl.trainer.throughput import Speed, peak_memory_gib

TEXT = Experiment(
    name="speed",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(),
    data=Data.Conversations("none.jsonl", max_length=32),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    batch_size=4,
    steps=2,
)


def test_a_cpu_has_rates_but_no_share_of_a_peak() -> None:
    speed = Speed.of(compile(TEXT))
    assert speed == Speed("samples", 4, None)
    assert speed.rates(100, 0.5) == {"tokens/s": 200.0, "samples/s": 8.0}
    assert speed.use(Flops(3e12, 5e12), 0.5) == {"model_tflops/s": 6.0}


def test_pairs_are_called_so() -> None:
    pairs = attrs.evolve(TEXT, objective=Objective.DPO(), data=Data.Preferences("none.jsonl"))
    assert Speed.of(compile(pairs)).rates(100, 0.5) == {"tokens/s": 200.0, "pairs/s": 8.0}


def test_use_is_a_share_of_all_devices_peak() -> None:
    speed = Speed("pairs", 4, 2e12)
    assert speed.use(Flops(0.5e12, 0.75e12), 0.5) == {"model_tflops/s": 1.0, "mfu": 0.5, "hfu": 0.75}


def test_memory_of_a_cpu_is_the_largest_resident_set_of_the_process() -> None:
    reported = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert abs(peak_memory_gib(jax.local_devices()) - int(reported.split()[1]) / 2**20) < 0.01
