"""The System page: this machine and live runs, sampled from real processes."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

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


def test_a_live_run_is_shown_with_what_its_processes_use(
    site: Site, busy: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(site.settings.home, experiment(0), "running", 3)
    status = json.loads((run / "status.json").read_text())
    process = {"pid": busy.pid, "pid_started": process_info.started(busy.pid), "host": process_info.hostname()}
    (run / "status.json").write_text(json.dumps({**status, **process, **process_info.clock()}))
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
    first, second = usage.parsed("0, NVIDIA A100, 512, 40960, [N/A]\n1, GB10, [N/A], [N/A], 3\n2, L4, 0, 23034, 0\n")
    assert (first.name, first.memory, first.utilization) == ("0: NVIDIA A100", 0.5, None)
    assert second.name == "2: L4"
