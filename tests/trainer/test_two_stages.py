"""Two stages by one command, in a real process: their run directories, and a second command."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from nnxdsl import Experiment, Mesh, from_json, to_dict
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_both_stages_run_by_one_command(finished: Any) -> None:
    assert finished.code == 0, finished.err
    assert finished.out == ""  # stdout is for --json
    sft, dpo = finished.run("sft").name, finished.run("dpo").name
    lines = finished.err.splitlines()
    first, inner, last = (
        lines.index(line)
        for line in ("dpo: reading data ...", f"{dpo} starts from {sft}, which is run first", "training dpo: 40 steps")
    )
    assert first < inner < lines.index("training sft: 60 steps") < last
    assert lines[-1] == f"finished at step 40: runs/{dpo}"
    for noise in ("Warning", "WARNING", "Traceback", "absl", "orbax"):
        assert noise not in finished.err


def test_the_directory_holds_everything(finished: Any) -> None:
    path = finished.run("dpo")
    assert sorted(entry.name for entry in path.iterdir()) == [
        "attempts.jsonl",
        "checkpoints",
        "control",
        "events.jsonl",
        "experiment.json",
        "experiment.py",
        "layout.json",
        "lock",
        "log.txt",
        "metrics.jsonl",
        "run.json",
        "samples.jsonl",
        "status.json",
    ]
    assert (path / "lock").read_text() == ""


def test_the_generated_file_builds_the_same_experiment(finished: Any) -> None:
    path = finished.run("dpo")
    space: dict[str, Any] = {"__name__": "generated"}
    exec((path / "experiment.py").read_text(encoding="utf-8"), space)
    assert space["experiment"] == from_json((path / "experiment.json").read_text(encoding="utf-8"), Experiment)
    assert path.name == space["experiment"].id


def test_the_attempt_says_where_it_ran(finished: Any) -> None:
    path = finished.run("dpo")
    (attempt,) = rows(path / "attempts.jsonl")
    assert attempt["attempt"] == 1
    assert attempt["start"] == 0
    assert attempt["argv"] == ["dpo.py"]
    assert attempt["cwd"] == str(finished.lab.place)
    assert attempt["devices"] == ["cpu:cpu"]
    assert attempt["versions"]["jax"] == jax.__version__
    assert attempt["experiment"]["mesh"] == to_dict(Mesh())
    assert attempt["experiment"]["microbatch_size"] is None


def test_the_status_says_that_it_finished(finished: Any) -> None:
    status = RunDirectory(finished.run("dpo")).status()
    wanted = {
        "state": "finished",
        "step": 40,
        "total": 40,
        "checkpoint": 40,
        "exit_code": 0,
        "error": None,
        "attempt": 1,
    }
    assert {name: status.get(name) for name in wanted} == wanted
    assert status.get("eta_seconds") == 0.0


def test_metrics_have_one_row_a_step(finished: Any) -> None:
    for name, steps in (("sft", 60), ("dpo", 40)):
        metrics = RunDirectory(finished.run(name)).metrics()
        assert [row["step"] for row in metrics] == list(range(steps))
        assert all(math.isfinite(row["loss"]) and row["tokens/s"] > 0 for row in metrics)
        tokens = [row["num_tokens"] for row in metrics]
        assert tokens == sorted(set(tokens))
    first = metrics[0]
    assert first["rewards/margins"] == 0.0
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_held_out_reward_accuracy_rises(finished: Any) -> None:
    evaluations = RunDirectory(finished.run("dpo")).evaluations()
    assert [row["step"] for row in evaluations] == [0, 20, 40]
    assert evaluations[0]["eval/rewards/accuracies"] == 0.0  # equal rewards are no preference
    assert evaluations[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluations[-1]["eval/rewards/accuracies"] == 1.0
    assert evaluations[-1]["eval/rewards/margins"] > 1.0


def test_samples_have_policy_and_reference(finished: Any) -> None:
    samples = RunDirectory(finished.run("dpo")).samples()
    assert [(row["step"], row["prompt"]) for row in samples] == [
        (step, prompt) for step in (0, 20, 40) for prompt in ("Hi 1", "Hi 2, how are you?")
    ]
    assert all(row["policy"] == row["reference"] for row in samples[:2])  # B = 0: the policy is the reference
    assert len({row["reference"] for row in samples if row["prompt"] == "Hi 1"}) == 1
    assert all(row["reference"] is None for row in RunDirectory(finished.run("sft")).samples())


def test_the_last_checkpoints_are_kept(finished: Any) -> None:
    with CheckpointReader(finished.run("dpo") / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [36, 40]
        assert set(checkpoints.contents(40)) == {"trainable", "optimizer"}
        assert checkpoints.meta(40)["batches"]["position"] == 40


def test_events_and_log_tell_the_story(finished: Any) -> None:
    path = finished.run("dpo")
    events = rows(path / "events.jsonl")
    assert [event["event"] for event in events] == ["data", "held-out data", f"starting runs/{path.name}", "finished"]
    assert (events[0]["source"], events[0]["rows"], events[0]["accepted"]) == ("pairs.jsonl", 40, 40)
    log = (path / "log.txt").read_text(encoding="utf-8")
    parts = (
        "  attempt 1: dpo.py\n",
        "  pairs.jsonl, rows:\n",
        "    read        40\n",
        "    trained on  40\n",
        "step 20, held out: loss",
        "  step 40/40, loss",
        "  checkpoint step 40 saved\n",
        "  finished at step 40\n",
    )
    for part in parts:
        assert part in log


def test_a_finished_run_is_shown_and_not_run_again(finished: Any) -> None:
    path = finished.run("dpo")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    code, out, err = finished.lab.python("dpo.py", "run", "--json")
    assert code == 0
    assert err.startswith(f"runs/{path.name}: already finished (use --restart to start again)\n")
    assert json.loads(out)["evaluations"]["40"]["eval/rewards/accuracies"] == 1.0
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(("file", "owner"), [("pairs.jsonl", "dpo"), ("chats.jsonl", "sft")])
def test_a_finished_run_over_other_data_is_refused(lab: Any, finished: Any, file: str, owner: str) -> None:
    for name in ("sft", "dpo"):
        shutil.copytree(finished.run(name), lab.place / "runs" / finished.run(name).name)
    with (lab.place / file).open("a") as rows:
        rows.write("\n")
    argv = ["dpo.py"] if owner == "dpo" else ["dpo.py", "objective.beta=0.3"]  # a new run from the finished one
    code, _, err = lab.python(*argv)
    assert code == 2
    error = err.splitlines()[-1]
    assert error.startswith(f"RunError: runs/{finished.run(owner).name} has finished with another {file} (sha256 ")
    assert error.endswith(f" now); restore the file, or run {owner} again with --restart")


@pytest.mark.slow
def test_restart_moves_away_and_begins_again(lab: Any, finished: Any) -> None:
    run = lab.place / "runs" / finished.run("sft").name
    shutil.copytree(finished.run("sft"), run)
    code, _, err = lab.python("sft.py", "evaluation=None", "--restart")
    assert code == 0, err
    assert f"moved what runs/{run.name} held to runs/.trash/{run.name}-" in err
    (moved,) = (lab.place / "runs" / ".trash").iterdir()
    assert RunDirectory(moved).evaluations() == RunDirectory(finished.run("sft")).evaluations()
    assert RunDirectory(run).evaluations() == []
    assert [row["attempt"] for row in rows(run / "attempts.jsonl")] == [1]
    losses, again = ([row["loss"] for row in RunDirectory(index).metrics()] for index in (moved, run))
    assert losses == again


@pytest.mark.extended
def test_a_run_in_use_is_refused(lab: Any, finished: Any) -> None:
    run = lab.place / "runs" / finished.run("sft").name
    shutil.copytree(finished.run("sft"), run)
    RunDirectory(run).write_status(state="running")
    hold = (
        "import sys, pathlib; from nnxdsl.runs.lock import RunLock; lock = RunLock(pathlib.Path(sys.argv[1])); input()"
    )
    command = [sys.executable, "-c", hold, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=lab.environment) as holder:
        while not (run / "lock").read_text().endswith("\n"):
            assert holder.poll() is None
            time.sleep(0.01)
        record = json.loads((run / "lock").read_text())
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert lab.python("sft.py") == (
            2,
            "",
            f"RunError: runs/{run.name} is in use by process {holder.pid} on {record['host']} since {record['since']}; "
            f"wait until it ends, or stop it with `kill -TERM {holder.pid}` (it saves first)\n",
        )
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
        holder.communicate(b"\n")


def test_importing_the_command_line_loads_no_jax() -> None:
    code = "import sys, nnxdsl.cli; print(any(name in sys.modules for name in ('jax', 'flax', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
