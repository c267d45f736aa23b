"""The System page: this machine and live runs, sampled from real processes."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.processes import usage
from app.state import Site
from nnxdsl.storage import process_info
from tests.app.many import experiment, write_run

native = pytest.importorskip("tests.app.native")
system_page = pytest.importorskip("app.pages.system")

BUSY = """
import subprocess, sys, time
held = bytearray(300_000_000)
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(200_000_000); print('held', flush=True); input()"],
                         stdin=subprocess.PIPE)
while True: pass
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    """A process that holds 300 MB, keeps a processor busy, and has a child that holds 200 MB."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def live(site: Site, number: int, process: subprocess.Popen[str]) -> Path:
    """A live run of a process."""
    run = write_run(site.settings.home, experiment(number), "running", 3)
    status = json.loads((run / "status.json").read_text())
    writer = {"pid": process.pid, "pid_started": process_info.started(process.pid), "host": process_info.hostname()}
    (run / "status.json").write_text(json.dumps({**status, **writer, **process_info.clock()}))
    return run


def test_a_live_run_is_shown_with_what_its_processes_use(
    site: Site, busy: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = live(site, 0, busy)
    monkeypatch.setattr(usage, "SECONDS", 0.0)
    samples = site.usage.samples()
    time.sleep(1)
    samples = site.usage.samples()
    assert len(samples) == 2
    assert 0.46 < samples[-1].runs[run.name].memory < 0.6
    assert 0.01 < samples[-1].runs[run.name].processors < 1.5
    assert 0.01 < samples[-1].processors <= samples[-1].count
    assert 0 < samples[-1].memory < samples[-1].total
    values = native.Built(system_page.System, site).shown()
    table = values["Dataframe 1"]
    assert table["Run"].tolist() == [run.name]
    assert 0.46 < float(table["Host memory, GiB"][0]) < 0.6
    assert {trace.name for trace in values["Plot"].data} == {"machine", run.name}
    busy.kill()
    busy.wait()
    assert site.usage.samples()[-1].runs == {}


def test_the_page_shows_the_machine(site: Site) -> None:
    values = native.Built(system_page.System, site).shown()
    assert "No run is live." in values["Markdown"]
    assert f"of {os.cpu_count()}**" in values["Markdown"]
    free, total = usage.disk(site.settings.home)
    assert 0 < free < total
    assert {trace.name for trace in values["Plot"].data} == {"machine"}


def test_gpus_are_those_of_the_driver() -> None:
    assert doctest.testmod(usage).failed == 0
    devices = "0, NVIDIA A100, 512, 40960, [N/A], GPU-a\n1, GB10, [N/A], [N/A], 3, GPU-b\n2, L4, 0, 23034, 0, GPU-c\n"
    first, second = usage.parsed(devices, "GPU-a, 17, 256\nGPU-a, 18, 128\nGPU-a, 19, [N/A]\nNo devices were found\n")
    assert (first.name, first.memory, first.utilization) == ("0: NVIDIA A100", 0.5, None)
    assert (first.processes[17], first.processes[18]) == (0.25, 0.125)
    assert math.isnan(first.processes[19])
    assert (second.name, second.processes) == ("2: L4", {})


NVIDIA_SMI = """#!{python}
import sys
gpu = any("query-gpu" in word for word in sys.argv)
print("0, NVIDIA H100, 30720, 81920, 97, GPU-1" if gpu else "GPU-1, {pid}, 20480\\nGPU-1, 1, 512")
"""


def test_a_run_is_shown_with_its_memory_on_gpus_and_their_load(
    site: Site, busy: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text(NVIDIA_SMI.format(python=sys.executable, pid=busy.pid))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    monkeypatch.setattr(usage, "SECONDS", 0.0)
    run = live(site, 0, busy)
    other = write_run(site.settings.home, experiment(1), "running", 3)
    values = native.Built(system_page.System, site).shown()
    gpus, runs = values["Dataframe"], values["Dataframe 1"].set_index("Run")
    assert gpus.to_dict("records") == [{"GPU": "0: NVIDIA H100", "Memory, GiB": "30.0 of 80.0", "Utilization": "97 %"}]
    assert runs.loc[run.name, "GPU memory, GiB"] == "20.0 of 0: NVIDIA H100"
    assert runs.loc[run.name, "Utilization of its GPUs"] == "97 %"
    assert other.name not in runs.index or runs.loc[other.name, "GPU memory, GiB"] == ""
    rendered = {trace.name for trace in values["Plot"].data}
    assert rendered == {"machine", run.name, "0: NVIDIA H100"}
