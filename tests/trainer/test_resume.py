"""Killed or stopped at any moment and run again, a run ends bit-equal to an undisturbed one, or is refused."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.run_dir import RunDirectory
from tests.waiting import HANG_SECONDS

TIMES = {"attempt", "tokens/s", "samples/s", "pairs/s", "model_tflops/s", "peak_memory_gib"}


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def arrays(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint."""
    with CheckpointReader(run / "checkpoints") as checkpoints:
        step = checkpoints.latest_good().step
        assert step is not None
        contents = checkpoints.contents(step)
        targets = {
            group: {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in infos.items()}
            for group, infos in contents.items()
        }
        restored = checkpoints.restore(step, targets)
    return {f"{step} {group}.{name}": np.asarray(x) for group, leaves in restored.items() for name, x in leaves.items()}


def assert_bit_equal(run: Path, other: Path) -> None:
    one, two = RunDirectory(run), RunDirectory(other)
    assert without_times(one.metrics()) == without_times(two.metrics())
    assert without_times(one.evaluations()) == without_times(two.evaluations())
    assert without_times(one.samples()) == without_times(two.samples())
    left, right = arrays(run), arrays(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert left[name].tobytes() == right[name].tobytes(), name


def rows_written(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0


@pytest.fixture
def after_sft(lab: Any, finished: Any) -> tuple[Any, Path]:
    """A lab in which the first stage has been run, and where the second will be."""
    shutil.copytree(finished.run("sft"), lab.place / "runs" / finished.run("sft").name)
    return lab, lab.place / "runs" / finished.run("dpo").name


@pytest.mark.gpu
@pytest.mark.slow
def test_killed_twice_it_ends_bit_equal(
    after_sft: tuple[Any, Path], finished: Any, wait_until: Callable[..., None]
) -> None:
    lab, run = after_sft
    seeded = random.Random(20)
    for least, most in ((2, 12), (13, 30)):
        moment = seeded.randint(least, most)
        child = lab.start("dpo.py")
        wait_until(lambda moment=moment: rows_written(run) > moment, child)
        time.sleep(seeded.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert RunDirectory(run).liveness() == "lost"
    code, _, err = lab.python("dpo.py")
    assert code == 0, err
    assert_bit_equal(run, finished.run("dpo"))
    directory = RunDirectory(run)
    assert [row["attempt"] for row in directory.attempts()] == [1, 2, 3]
    assert any(event["event"] == "stale lock recovered" for event in directory.events())
    assert directory.attempts()[2]["start"] >= 6
    resumed = directory.attempts()[2]["start"]
    assert f"resuming runs/{run.name} at step {resumed}" in err
    assert f"{run.name} starts from {finished.run('sft').name}, which has been run" in err
    assert len(RunDirectory(lab.place / "runs" / finished.run("sft").name).attempts()) == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_stopped_by_signals_and_by_a_file_it_ends_bit_equal(
    lab: Any, finished: Any, wait_until: Callable[..., None]
) -> None:
    run = lab.place / "runs" / finished.run("sft").name
    ways: list[tuple[Callable[[Any], object], int, int]] = [
        (lambda child: child.send_signal(signal.SIGTERM), 4, 143),
        (lambda child: child.send_signal(signal.SIGINT), 20, 130),
        (lambda child: (run / "control" / "stop").touch(), 40, 0),
    ]
    for stop, moment, expected in ways:
        child = lab.start("sft.py", "run", "--json")
        wait_until(lambda moment=moment: rows_written(run) > moment, child)
        stop(child)
        out, err = child.communicate(timeout=100)
        assert child.returncode == expected, err
        status = RunDirectory(run).status()
        step = status.get("step")
        assert (status.get("state"), status.get("exit_code"), status.get("checkpoint")) == ("stopped", expected, step)
        assert f"stopped at step {step}, everything saved; run it again to resume" in err
        assert ("stopping after this step" in err) == (expected != 0)
        assert json.loads(out)["state"] == "stopped"
        with CheckpointReader(run / "checkpoints") as checkpoints:
            assert checkpoints.latest_good().step == step
    assert lab.python("sft.py")[0] == 0
    assert_bit_equal(run, finished.run("sft"))


@pytest.mark.faults
def test_a_second_signal_leaves_at_once_even_while_xla_compiles(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.monotonic()
    child = lab.start("sft.py", "run", "evaluation=None", "microbatch_size=2")
    try:
        wait_until(lambda: any('"compiling"' in f.read_text() for f in lab.place.glob("runs/*/status.json")), child)
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
        sent = time.monotonic()
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=HANG_SECONDS)
        assert time.monotonic() - sent < sent - began, "ending takes as long as starting"
        assert child.returncode == 143
        err = child.communicate()[1]
        assert err.endswith(
            "stopping after this step, with everything saved; "
            "a second signal exits at once (the last checkpoint stays)\n"
        )
    finally:
        child.kill()
        child.communicate()


@pytest.mark.slow
def test_a_diverging_run_fails_and_keeps_its_checkpoint(lab: Any) -> None:
    argv = ("sft.py", "run", "evaluation=None", "checkpoint.every_steps=1", "optimizer.max_grad_norm=None", "name=nan")
    code, out, err = lab.python(*argv, "optimizer.schedule=Schedule.Constant(lr=1e30)")
    assert (code, out) == (1, "")
    (run,) = lab.place.glob("runs/nan-*")
    directory = RunDirectory(run)
    last = directory.metrics()[-1]
    step = last["step"]
    assert np.isnan(last["grad_norm"])
    error = err.splitlines()[-1]
    text = f"loss is {last['loss']:.4g}, grad_norm nan"
    assert error.startswith(f"TrainingError: step {step}: {text}; its rows begin with chats.jsonl:")
    cure = "lower the learning rate, look at those rows, or skip such steps with guard=Guard.Skip()"
    assert error.endswith(f"; the state before it is saved as step {step}; {cure}")
    status = directory.status()
    assert (status.get("state"), status.get("exit_code")) == ("failed", 1)
    assert status.get("error") == error.replace("TrainingError", "RunError")
    assert "Traceback" in directory.log.read_text(encoding="utf-8")
    with CheckpointReader(run / "checkpoints") as checkpoints:
        assert checkpoints.latest_good().step == step


@pytest.fixture
def stopped(lab: Any, finished: Any) -> tuple[Any, Path]:
    """A lab with the second stage at step 36, as a kill after the last but one checkpoint leaves it."""
    for name in ("sft", "dpo"):
        shutil.copytree(finished.run(name), lab.place / "runs" / finished.run(name).name)
    run = lab.place / "runs" / finished.run("dpo").name
    shutil.rmtree(run / "checkpoints" / "00000040")
    RunDirectory(run).write_status(state="running", step=38, pid=1, pid_started=1)
    return lab, run


def contents(run: Path) -> dict[Path, bytes]:
    ours = ("log.txt", "lock", "status.json")
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name not in ours}


def test_changed_data_are_refused(stopped: tuple[Any, Path]) -> None:
    lab, run = stopped
    before, status = contents(run), (run / "status.json").read_text()
    with (lab.place / "pairs.jsonl").open("a") as file:
        file.write('{"prompt": "Say 99: ", "chosen": "good", "rejected": "bad"}\n')
    code, _, err = lab.python("dpo.py")
    assert code == 2
    error = err.splitlines()[-1]
    assert error.startswith(
        "DataError: pairs.jsonl: cannot resume from the checkpoint: the data file has changed (sha256): "
        "the checkpoint has "
    )
    assert error.endswith("; the number of accepted rows has changed: the checkpoint has 40, this run 41")
    assert contents(run) == before
    assert (run / "status.json").read_text() == status


@pytest.mark.extended
def test_changed_frozen_weights_are_refused(stopped: tuple[Any, Path]) -> None:
    lab, run = stopped
    before = contents(run)
    (sft,) = lab.place.glob("runs/sft-*")
    with CheckpointReader(sft / "checkpoints") as checkpoints:
        infos, meta = checkpoints.contents(60)["trainable"], checkpoints.meta(60)
        targets = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in infos.items()}
        leaves = checkpoints.restore(60, {"trainable": targets})["trainable"]
    shutil.rmtree(sft / "checkpoints")
    with Checkpoints(sft / "checkpoints") as checkpoints:
        checkpoints.save(60, {"trainable": leaves | {"norm.scale": leaves["norm.scale"].at[0].add(0.5)}}, meta)
        checkpoints.wait()
    code, _, err = lab.python("dpo.py")
    assert code == 2
    error = err.splitlines()[-1]
    assert error.startswith(
        f"RunError: runs/{run.name}: cannot resume from step 36: the frozen weights or the reference have changed "
        f"(digest of what model.weights gives): the checkpoint has "
    )
    assert error.endswith("...; restore it, or start again with --restart")
    assert contents(run) == before


@pytest.mark.extended
def test_a_changed_tokenizer_is_refused(stopped: tuple[Any, Path]) -> None:
    lab, run = stopped
    with CheckpointReader(run / "checkpoints") as checkpoints:
        fingerprint = checkpoints.meta(36)["identity"]["tokenizer"]
    code = "import nnxdsl.data.tokenizers.base as t; t.TURNS += ' '; import sft, dpo; dpo.experiment.main()"
    status, _, err = lab.python("-c", code)
    assert status == 2
    assert (
        f"RunError: runs/{run.name}: cannot resume from step 36: the tokenizer has changed (fingerprint): "
        f"the checkpoint has {fingerprint[:12]}..., this run " in err
    )


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_said(lab: Any, finished: Any) -> None:
    for name in ("sft", "dpo"):
        shutil.copytree(finished.run(name), lab.place / "runs" / finished.run(name).name)
    run = lab.place / "runs" / finished.run("dpo").name
    victim = max((run / "checkpoints" / "00000040").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    RunDirectory(run).write_status(state="running", pid=1, pid_started=1)
    code, _, err = lab.python("dpo.py")
    assert code == 0, err
    name = victim.relative_to(run / "checkpoints" / "00000040").as_posix()
    damage = f"{name} has changed since it was written (sha256 differs)"
    said = f"checkpoint step 40 is damaged: {damage}; going back to step 36"
    assert said in err.splitlines()
    assert said in [event["event"] for event in RunDirectory(run).events()]
    assert said in RunDirectory(run).log.read_text(encoding="utf-8")
    assert_bit_equal(run, finished.run("dpo"))
