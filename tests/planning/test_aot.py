"""What compilers say of memory, in the report's words, and answers that are problems."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nnxdsl import Experiment, Mesh, Objective
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.errors import PlanError
from nnxdsl.planning import aot
from nnxdsl.sharding import hardware


def analysis(**fields: int) -> Any:
    argv = ("argument", "output", "alias", "temp")
    names = [f"{place}{word}_size_in_bytes" for place in ("", "host_") for word in argv]
    return SimpleNamespace(**{**dict.fromkeys(names, 0), **fields})


def test_memory_in_the_reports_words() -> None:
    device = {"argument_size_in_bytes": 100, "output_size_in_bytes": 60, "alias_size_in_bytes": 50}
    host = {"host_argument_size_in_bytes": 8, "host_temp_size_in_bytes": 3}
    said = analysis(**device, temp_size_in_bytes=40, peak_memory_in_bytes=130, **host)
    parts = {"arguments": 100, "outputs": 60, "aliased": 50, "temporaries": 40, "allocated": 150, "host": 11}
    assert aot.memory(said, "gpu") == {**parts, "peak": 130}
    assert tuple(aot.memory(said, "gpu")) == hardware.FIGURES


def test_the_peak_of_a_cpu_counts_temporaries() -> None:
    said = analysis(argument_size_in_bytes=100, temp_size_in_bytes=40, peak_memory_in_bytes=100)
    assert aot.memory(said, "cpu")["peak"] == 140


@pytest.mark.parametrize(
    ("message", "problem", "peak"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (167.66G) exceeds available HBM (15.75G). HLO module: jit__lambda.\nSee https://openxla.org",
            "out of memory: 167.66G of 15.75G",
            int(167.66 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 51.91G of 15.75G hbm. Exceeded hbm capacity by 36.16G.",
            "out of memory: 51.91G of 15.75G",
            int(51.91 * 2**30),
        ),
        (
            "UNIMPLEMENTED: no such custom call\nmore",
            "the compiler failed: UNIMPLEMENTED: no such custom call",
            None,
        ),
    ],
)
def test_a_compilers_refusal_is_one_line(message: str, problem: str, peak: int | None) -> None:
    assert aot._compile_problem(message) == (problem, peak)


@pytest.mark.extended
def test_one_cpu_in_this_process(experiment: Callable[..., Experiment]) -> None:
    report = aot.compile_ahead(experiment(objective=Objective.SFT(loss_on="all")), "cpu", 1)
    assert report["problem"] is None
    assert report["collectives"] == []
    assert report["memory"]["arguments"] > report["memory"]["aliased"] > 0
    assert report["memory"]["peak"] == report["memory"]["allocated"] > report["memory"]["temporaries"] > 0


def test_an_experiment_that_does_not_fit_is_an_answer(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(mesh=Mesh(data=4))
    with pytest.raises(PlanError, match=r"data=4 takes 4 devices, there are 1"):
        aot.compile_ahead(asked, "cpu", 1)
    said = aot.answer({"experiment": to_dict(asked), "device": "cpu", "count": 1})["error"]
    assert said["type"] == "PlanError"
    assert said["problems"] == [["mesh", "data=4 takes 4 devices, there are 1 (cpu)"]]
    tree = {**to_dict(asked), "stepz": 3}
    assert aot.answer({"experiment": tree, "device": "cpu", "count": 1})["error"]["type"] == "SpecError"
