"""The compiler in a process of its own: real children, their time limit and crashes, and the reports that are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from nnxdsl import Adapter, Data, Experiment, Mesh, Model, Objective, Optimizer, Schedule
from nnxdsl.errors import PlanError, RunError
from nnxdsl.planning import aot_process
from nnxdsl.planning.aot_process import PLUGINS, compiled_report, find_compiler
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.runs.run_list import list_runs
from nnxdsl.sharding import hardware
from nnxdsl.storage import process_info

EXPERIMENT = Experiment(
    name="small",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("none.jsonl", max_length=16),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None),
    batch_size=8,
    steps=2,
    mesh=Mesh(fsdp=8),
)


@attrs.frozen
class Compiled:
    home: Path
    report: dict[str, Any]
    pids: list[int]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    home, pids = tmp_path_factory.mktemp("home") / "runs", []
    report = compiled_report(EXPERIMENT, "cpu", 8, home=home, on_start=pids.append)
    return Compiled(home, report, pids)


def kept(home: Path) -> list[Path]:
    return sorted((home / aot_process.CACHE).iterdir())


def put_aside(compiled: Compiled, home: Path) -> Path:
    """A home of its own with the report that was compiled."""
    (source,) = kept(compiled.home)
    place = home / aot_process.CACHE
    place.mkdir(parents=True)
    (place / source.name).write_bytes(source.read_bytes())
    return place / source.name


@pytest.mark.extended
def test_a_step_on_eight_devices(compiled: Compiled) -> None:
    report = compiled.report
    assert report["problem"] is None
    assert report["cached"] is False
    assert (report["device"], report["count"], report["topology"], report["usable"]) == ("cpu", 8, "", None)
    assert report["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert report["lower_seconds"] > 0
    assert report["compile_seconds"] > 0
    memory = report["memory"]
    assert tuple(memory) == hardware.FIGURES
    assert memory["allocated"] == memory["peak"]
    placed = build_blueprint(EXPERIMENT).layout.device_bytes()
    step, tokens, length, mask, weight = 4, 4 * 16, 4, 16, 4  # a row on each device
    assert memory["arguments"] == sum(placed.values()) + step + tokens + length + mask + weight
    assert memory["aliased"] == sum(placed.values()) + step  # each is replaced in its place
    kinds = {one["kind"] for one in report["collectives"]}
    assert {"all-gather", "all-reduce"} & kinds
    assert all(one["group"] in (0, 8) and one["count"] > 0 for one in report["collectives"])
    assert len(compiled.pids) == 1
    assert not process_info.is_alive(compiled.pids[0], None)


@pytest.mark.extended
def test_it_is_not_compiled_twice(compiled: Compiled) -> None:
    started: list[int] = []
    renamed = attrs.evolve(EXPERIMENT, name="other", notes="the program is the same")
    again = compiled_report(renamed, "CPU", 8, home=compiled.home, on_start=started.append)
    assert again == {**compiled.report, "cached": True}
    assert started == []
    assert len(kept(compiled.home)) == 1
    assert list_runs(compiled.home) == []


@pytest.mark.extended
@pytest.mark.parametrize("text", ["", "{", "[]", '{"memory": {}}'])
def test_a_damaged_report_is_compiled_again(compiled: Compiled, tmp_path: Path, text: str) -> None:
    put_aside(compiled, tmp_path).write_text(text)
    # The limit shows that a compiler was started, without waiting for it.
    report = compiled_report(EXPERIMENT, "cpu", 8, home=tmp_path, limit_seconds=0.05)
    assert report["cached"] is False
    assert report["problem"] == "exceeded its time limit of 0.05 s"


@pytest.mark.extended
def test_what_is_compiled_is_in_the_key(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_aside(compiled, tmp_path)

    def is_known(experiment: Experiment, count: int = 8, **options: Any) -> bool:
        return compiled_report(experiment, "cpu", count, home=tmp_path, limit_seconds=0.05, **options)["cached"]

    assert is_known(EXPERIMENT)
    assert not is_known(EXPERIMENT, refresh=True)
    assert not is_known(EXPERIMENT, count=16)
    assert not is_known(attrs.evolve(EXPERIMENT, mesh=Mesh(data=8)))
    assert not is_known(attrs.evolve(EXPERIMENT, batch_size=16))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not is_known(EXPERIMENT)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(aot_process, "code_digest", lambda: "of other code")
    assert not is_known(EXPERIMENT)


def test_a_time_limit_ends_all_that_was_started(tmp_path: Path) -> None:
    started: list[int] = []
    report = compiled_report(EXPERIMENT, "cpu", 4, home=tmp_path, limit_seconds=0.7, on_start=started.append)
    assert report["problem"] == "exceeded its time limit of 0.7 s"
    assert report["memory"] == dict.fromkeys(hardware.FIGURES)
    assert (report["collectives"], report["lower_seconds"], report["compile_seconds"]) == (None, None, None)
    assert not (tmp_path / aot_process.CACHE).exists()  # the next one may have more time
    (pid,) = started
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


@pytest.mark.extended
def test_what_is_known_on_time_and_too_late_has_the_same_names(compiled: Compiled, tmp_path: Path) -> None:
    late = compiled_report(EXPERIMENT, "cpu", 8, home=tmp_path, limit_seconds=0.05)
    assert late.keys() == compiled.report.keys()


def test_too_few_devices_are_refused_as_by_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        compiled_report(EXPERIMENT, "cpu", 2, home=tmp_path)
    assert str(caught.value) == ("1 problem in Experiment 'small'\n  mesh: fsdp=8 takes 8 devices, there are 2 (cpu)")
    with pytest.raises(PlanError, match="there is no 'h20'; did you mean 'h200'"):
        compiled_report(EXPERIMENT, "h20", 8, home=tmp_path)


def test_a_crash_shows_what_was_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(RunError) as caught:
        compiled_report(EXPERIMENT, "cpu", 1, home=tmp_path)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("the compiler for cpu ")
    assert any("--xla_no_such_flag=1" in line for line in rest)


def wheel(directory: Path, name: str, version: str) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_absent_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLUGINS, raising=False)
    monkeypatch.setattr(sys, "path", [str(Path(importlib.metadata.distribution("jaxlib").locate_file("")))])
    jaxlib = importlib.metadata.version("jaxlib")
    monkeypatch.setattr(aot_process, "_versions_in", lambda place: {})
    with pytest.raises(RunError) as caught:
        compiled_report(EXPERIMENT, "h200", 8, home=tmp_path)
    assert str(caught.value) == (
        "there is no compiler for CUDA GPUs here; install it: pip install 'nnxdsl[plan-cuda]' (or in a "
        f"directory of its own: pip install --no-deps --target DIR jax-cuda12-plugin=={jaxlib} "
        f"jax-cuda12-pjrt=={jaxlib}; NNXDSL_PLAN_PLUGINS=DIR)"
    )
    with pytest.raises(RunError) as caught:
        compiled_report(EXPERIMENT, "v5e", 8, home=tmp_path)
    assert str(caught.value) == (
        "there is no compiler for TPUs here; install it: pip install 'nnxdsl[plan-tpu]' (or in a "
        "directory of its own: pip install --no-deps --target DIR libtpu; NNXDSL_PLAN_PLUGINS=DIR)"
    )


def test_compilers_are_found_in_a_directory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, str(tmp_path / "plugins"))
    with pytest.raises(RunError, match=r"NNXDSL_PLAN_PLUGINS=.*plugins: there is no such directory; install it: pip"):
        find_compiler("gpu")
    assert find_compiler("cpu").directory is None
    jaxlib = importlib.metadata.version("jaxlib")
    for name, version in (("libtpu", "0.0.51"), ("jax-cuda12-plugin", jaxlib), ("jax-cuda12-pjrt", jaxlib)):
        wheel(tmp_path / "plugins", name, version)
    actual = find_compiler("gpu")
    assert actual.directory == tmp_path / "plugins"
    assert actual.versions == {"jax-cuda12-plugin": jaxlib, "jax-cuda12-pjrt": jaxlib}
    assert find_compiler("tpu").versions == {"libtpu": "0.0.51"}


def test_a_compiler_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, str(tmp_path))
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        wheel(tmp_path, name, "0.1.2")
    jaxlib = importlib.metadata.version("jaxlib")
    with pytest.raises(RunError) as caught:
        find_compiler("gpu")
    assert str(caught.value).startswith(
        f"jax-cuda12-plugin is 0.1.2, jax-cuda12-pjrt is 0.1.2, but jaxlib is {jaxlib}, and both must be of one "
        "version; install it: pip install 'nnxdsl[plan-cuda]'"
    )


def test_nothing_of_it_loads_jax() -> None:
    code = "import sys, nnxdsl.planning.aot_process; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def needs(platform: hardware.Platform) -> None:
    try:
        find_compiler(platform)
    except RunError as error:
        pytest.skip(str(error))


LORA = attrs.evolve(
    EXPERIMENT,
    objective=Objective.DPO(),
    adapter=Adapter.LoRA(rank=4),
    data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "a100", "b200", "rtx4090"])
def test_gpus_that_are_not_there(device: str, tmp_path: Path) -> None:
    needs("gpu")
    report = compiled_report(LORA, device, 8, home=tmp_path)
    assert report["problem"] is None
    assert 0 < report["memory"]["arguments"] < report["memory"]["allocated"] < 2**30
    assert {"all-gather", "all-reduce"} <= {one["kind"] for one in report["collectives"]}
    assert json.loads(kept(tmp_path)[0].read_text())["versions"].keys() >= {"jax-cuda12-plugin"}


@pytest.mark.slow
def test_gpus_in_two_slices(tmp_path: Path) -> None:
    needs("gpu")
    two = attrs.evolve(LORA, mesh=Mesh(data=2, fsdp=8, slices=2), batch_size=16)
    report = compiled_report(two, "h200", 16, home=tmp_path)
    assert (report["problem"], report["topology"]) == (None, "2x1x8")


@pytest.mark.slow
def test_a_tpu_that_is_not_there(tmp_path: Path) -> None:
    needs("tpu")
    report = compiled_report(LORA, "v5e", 8, home=tmp_path)
    assert (report["problem"], report["topology"]) == (None, "v5e:2x4")
    assert 0 < report["memory"]["arguments"] < report["memory"]["allocated"] < 2**30
    assert report["collectives"]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "platform"), [("rtx4090", "gpu"), ("v5e", "tpu")])
def test_what_does_not_fit_is_an_answer(device: str, platform: hardware.Platform, tmp_path: Path) -> None:
    needs(platform)
    large = attrs.evolve(
        EXPERIMENT,
        model=Model.Gemma3("4b"),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
        mesh=Mesh(),
    )
    report = compiled_report(large, device, 1, home=tmp_path, limit_seconds=250)
    assert report["problem"].startswith("out of memory: ")
    assert report["memory"]["arguments"] > 3 * 4 * 3.8e9  # weights and two moments, float32
    assert report["memory"]["peak"] > report["usable"]
    assert report["cached"] is False
