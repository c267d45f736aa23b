"""The run directory: kills, damage, foreign files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.run_list import list_runs
from nnxdsl.runs.status import SILENT_SECONDS
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, read_json, write_json
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def make(home: Path, name: str = "dpo-1a2b3c4d", identity: str = "one") -> RunDirectory:
    return RunDirectory.create(
        home / name, identity=identity, experiment_json={"schema": 1, "name": "dpo"}, experiment_py="experiment = 1\n"
    )


def python(code: str, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *argv], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_the_store_and_the_lock_leave_jax_unloaded() -> None:
    code = "import sys, nnxdsl.runs.run_dir, nnxdsl.runs.lock; print('jax' in sys.modules, 'orbax' in sys.modules)"
    child = python(code)
    assert child.communicate()[0] == "False False\n"
    assert child.returncode == 0


def test_a_new_run_holds_its_experiment(tmp_path: Path) -> None:
    run = make(tmp_path / "runs")
    assert run.experiment() == {"schema": 1, "name": "dpo"}
    assert (run.path / "experiment.py").read_text() == "experiment = 1\n"
    assert run.status() == {"state": "queued"}
    assert run.liveness() == "queued"
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == ["dpo-1a2b3c4d"]
    assert run.layout() is None
    run.write_layout({"a": 1})
    assert run.layout() == {"a": 1}


def test_the_same_experiment_opens_the_run_that_is_there(tmp_path: Path) -> None:
    make(tmp_path).append_metrics({"step": 1})
    assert make(tmp_path).metrics() == [{"step": 1}]


def test_another_experiment_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run = make(tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in run.path.iterdir()}
    with pytest.raises(RunError) as raised:
        make(tmp_path, identity="two")
    assert str(raised.value) == (
        f"{run.path} holds another experiment (dpo, made {run.created}); "
        f"give this one another directory, or move that one away"
    )
    assert {file.name: file.stat().st_mtime_ns for file in run.path.iterdir()} == before


def test_other_peoples_files_are_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    for name in "abcd":
        (target / name).write_text("mine")
    with pytest.raises(RunError) as raised:
        make(tmp_path, "thesis")
    assert str(raised.value) == (
        f"{target} is no run directory: it has no run.json and holds a, b, c and 1 more; name another one"
    )
    assert sorted(entry.name for entry in target.iterdir()) == ["a", "b", "c", "d"]


def test_an_empty_directory_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make(tmp_path, "empty").status() == {"state": "queued"}


@pytest.mark.parametrize("name", ["Upper", "-dash", "a b", "a\n", "x" * 82, "..", "é"])
def test_run_ids_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot be a run id; expected up to 81 of a-z"):
        make(tmp_path, name)


def test_a_run_must_not_be_a_link_out_of_its_home(tmp_path: Path) -> None:
    outside, home = tmp_path / "outside", tmp_path / "home"
    outside.mkdir()
    home.mkdir()
    (home / "linked").symlink_to(outside)
    with pytest.raises(RunError) as raised:
        make(home, "linked")
    assert str(raised.value) == f"{home / 'linked'} is a link that leads out of {home}; name the run directory itself"
    assert list(outside.iterdir()) == []


def test_artifacts_stay_inside_the_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.path / "out").symlink_to(tmp_path)
    assert run.file("checkpoints/00000001") == run.path / "checkpoints" / "00000001"
    for path in ("../other", "/etc/passwd", "out/x"):
        with pytest.raises(RunError) as raised:
            run.file(path)
        assert str(raised.value) == f"{run.path}: '{path}' leads out of the run directory; name a file inside it"


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no such run"):
        RunDirectory(tmp_path / "none")


def test_a_run_of_another_format_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path)
    write_json(run.path / "run.json", {"format": 9, "identity": "one", "created": "then"})
    with pytest.raises(RunError) as raised:
        RunDirectory(run.path)
    assert str(raised.value) == (
        f"{run.path / 'run.json'}: written in format 9, but this nnxdsl reads format 1; use the version that wrote it"
    )


CREATE = """
import os, signal, sys
from pathlib import Path
from nnxdsl.runs.run_dir import RunDirectory
left = int(sys.argv[2])
def counted(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
os.fsync, os.rename, os.replace, os.mkdir = map(counted, (os.fsync, os.rename, os.replace, os.mkdir))
RunDirectory.create(Path(sys.argv[1]), identity="one", experiment_json={"schema": 1}, experiment_py="")
print("made")
"""


@pytest.mark.faults
def test_a_creator_killed_at_any_call_leaves_no_half_run(tmp_path: Path) -> None:
    for calls in range(40):
        home = tmp_path / str(calls)
        home.mkdir()
        said = python(CREATE, str(home / "r"), str(calls)).communicate()[0]
        runs = list_runs(home)
        assert [run.problem for run in runs] == [None] * len(runs)
        assert (home / "r").exists() == bool(runs)
        make(home, "r")  # the next one finishes the work and sweeps what the killed one left
        assert [entry.name for entry in home.iterdir()] == ["r"]
        if said == "made\n":
            break
    else:
        pytest.fail("the creator never came to its end")
    assert calls > 10  # so many calls were really killed


def test_status_keeps_what_is_not_replaced(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.take_over(state="running", step=3, total=10, attempt=1)
    run.write_status(step=4)
    status = run.status()
    assert (status.get("state"), status.get("step"), status.get("total")) == ("running", 4, 10)
    assert status.get("pid") == os.getpid()
    with pytest.raises(TypeError, match="status has no field stpe; there are: attempt, checkpoint"):
        run.write_status(stpe=5)  # type: ignore[call-arg]


def test_a_new_attempt_forgets_how_the_last_one_ended(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.write_status(state="failed", error="out of memory", exit_code=1, step=7)
    run.take_over(state="starting")
    status = run.status()
    assert (status.get("error"), status.get("exit_code"), status.get("step")) == (None, None, 7)


def test_a_beat_writes_at_most_once_in_its_time(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.beat(step=1, every_seconds=60)
    assert not run.beat(step=2, every_seconds=60)
    assert run.status().get("step") == 1
    assert run.beat(step=3, every_seconds=0)


def test_a_damaged_status_is_named_and_started_afresh(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.path / "status.json").write_text('{"state": "dancing"}')
    with pytest.raises(RunError) as raised:
        run.status()
    assert str(raised.value) == (
        f"{run.path / 'status.json'}: damaged; expected an object with a state "
        f"(queued, starting, compiling, running, stopping, stopped, finished, failed)"
    )
    run.write_status(state="running")
    assert run.status().get("state") == "running"


WRITER = """
import sys, time
from pathlib import Path
from nnxdsl.runs.run_dir import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
run.take_over(state="running", step=0)
print("ready", flush=True)
step = 0
while True:
    step += 1
    run.append_metrics({"step": step, "loss": 1 / 3, "text": "x" * 3000})
    run.write_status(step=step)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_records(tmp_path: Path) -> None:
    run = make(tmp_path)
    random_ = random.Random(0)
    last = 0
    for _ in range(6):
        child = python(WRITER, str(run.path))
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert run.liveness() == "running"
        time.sleep(random_.uniform(0.01, 0.1))
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is dead then, and a zombie that nobody has reaped
        assert run.liveness() == "lost"
        child.communicate()
        assert run.liveness() == "lost"
        rows = run.metrics()
        step = run.status().get("step") or 0
        assert 0 <= rows[-1]["step"] - step <= 1
        last = len(rows)
    assert last > 10


def test_liveness_is_what_is_true(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.take_over(state="compiling")
    assert run.liveness() == "running"
    me = process_info.current()
    assert me.started is not None
    run.write_status(pid_started=me.started - 1)  # the pid is used again by another process
    assert run.liveness() == "lost"
    run.write_status(pid_started=me.started, host="elsewhere")
    assert run.liveness() == "running"  # its pid cannot be looked up, its heartbeat is fresh
    for state in ("stopped", "finished", "failed"):
        run.write_status(state=state)
        assert run.liveness() == state


def test_silence_is_told_from_death(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.take_over(state="running")
    status = dict(run.status())
    heartbeat = process_info.clock()
    heartbeat["monotonic"] -= SILENT_SECONDS + 1
    write_json(run.path / "status.json", {**status, "heartbeat": heartbeat})
    assert run.liveness() == "silent"
    heartbeat = {"wall": time.time() - SILENT_SECONDS - 1, "boot": "another", "monotonic": 0.0}
    write_json(run.path / "status.json", {**status, "heartbeat": heartbeat, "host": "elsewhere"})
    assert run.liveness() == "lost"


@pytest.mark.parametrize("jump", [-1e7, 1e7])
def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    run = make(tmp_path)
    run.take_over(state="running")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert run.liveness() == "running"
    assert process_info.seconds_since(run.status().get("heartbeat") or {}) < 60


def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append_metrics({"step": 1})
    run.close()
    path = run.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 2, "loss": 0.12')
    assert run.metrics() == [{"step": 1}]
    assert path.read_bytes().endswith(b"0.12")  # a reader changes nothing
    run.append_metrics({"step": 2, "loss": 0.5})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "loss": 0.5}\n'


def test_a_long_torn_line_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    lines = JsonLines(path)
    lines.append({"a": 2})
    assert lines.read() == [{"a": 1}, {"a": 2}]
    path.write_bytes(b"x" * 200_000)
    fresh = JsonLines(path)
    fresh.append({"a": 3})
    assert fresh.read() == [{"a": 3}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": }', "not JSON (Expecting value: line 1 column 10 (char 9)); remove the line"),
        (b"[1]", "expected a JSON object, got list; remove the line"),
    ],
)
def test_damage_before_the_last_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    run = make(tmp_path)
    path = run.path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(RunError) as raised:
        run.events()
    assert str(raised.value) == f"{path}:2: {message}"


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    run = make(tmp_path)
    row = {"step": 1, "prompt": "[b]grün\u2028\ud800 \n", "loss": float("inf"), "third": 1 / 3}
    run.append_sample(row)
    assert run.samples() == [row]
    with pytest.raises(TypeError, match="the row needs an int 'step', got None"):
        run.append_metrics({"loss": 1.0})


def test_a_resume_doubles_no_step(tmp_path: Path) -> None:
    run = make(tmp_path)
    for step in range(1, 6):
        run.append_metrics({"step": step, "loss": step / 10})
        run.append_sample({"step": step, "text": "x"})
    run.append_evaluation({"step": 4, "eval_loss": 0.4})
    run.append_evaluation({"step": 5, "eval_loss": 0.5})
    run.append_event({"step": 5, "kind": "saved"})
    first = (run.path / "metrics.jsonl").read_bytes().splitlines()[:3]
    for _ in range(2):
        assert run.repair_rows(4) == ["metrics.jsonl: there are no metrics of step 0"]
    assert (run.path / "metrics.jsonl").read_bytes().splitlines() == first
    run.append_metrics({"step": 4, "loss": 0.4})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert [row["step"] for row in run.samples()] == [1, 2, 3]
    assert run.evaluations() == []
    assert [row["step"] for row in run.events()] == [5]


def test_evaluations_are_told_from_steps(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append_metrics({"step": 1, "loss": 0.5})
    run.append_evaluation({"step": 1, "eval_loss": 0.4})
    assert run.metrics() == [{"step": 1, "loss": 0.5}]
    assert run.evaluations() == [{"kind": "evaluation", "step": 1, "eval_loss": 0.4}]


FULL = """
import resource, signal, sys
from pathlib import Path
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.errors import RunError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDirectory(Path(sys.argv[1]))
run.append_metrics({"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
for write in (lambda: run.append_metrics({"step": 2, "text": "x" * 100}), lambda: run.write_status(step=9)):
    try:
        write()
    except RunError as error:
        print(error)
"""


def test_a_full_disk_tears_nothing(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.write_status(step=1)
    said = python(FULL, str(run.path)).communicate()[0].splitlines()
    assert said[0] == (
        f"{run.path / 'metrics.jsonl'}: the row could not be written: only 8 of 124 bytes were written; "
        f"free some space and run again"
    )
    assert said[1] == f"{run.path / 'status.json'}: cannot be written: [Errno 27] File too large"
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert run.status().get("step") == 1
    assert [entry.name for entry in run.path.iterdir() if entry.name.startswith(".")] == []


def test_attempts_are_numbered_and_say_where_they_ran(tmp_path: Path) -> None:
    run = make(tmp_path)
    argv = ["run", "token=abc", "--api-key=xyz", "hf_abcdefghijkl", "steps=3"]
    record = process_info.environment(argv=argv, cwd=ROOT)
    assert run.append_attempt(record) == 1
    assert run.append_attempt(record) == 2
    first, second = run.attempts()
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["argv"] == ["run", "token=***", "--api-key=***", "***", "steps=3"]
    assert first["time"].endswith("+00:00")
    assert first["pid"] == os.getpid()
    assert "jax" in first["versions"]
    assert json.loads(json.dumps(first)) == first


def test_git_is_recorded_where_there_is_a_repository(tmp_path: Path) -> None:
    assert process_info.git_state(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "a").write_text("1")
    for argv in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *argv], check=True)
    state = process_info.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert (process_info.git_state(tmp_path) or {})["dirty"] is True


def test_requests_are_made_heeded_and_forgotten(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert not run.stop_requested()
    RunDirectory(run.path).request_stop()
    assert run.stop_requested()
    run.clear_requests()
    assert not run.stop_requested()


def test_the_list_of_runs_tells_of_damage(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    good = make(tmp_path, "good")
    good.take_over(state="running", step=5, total=10)
    status, record = make(tmp_path, "status"), make(tmp_path, "record")
    (status.path / "status.json").write_bytes(b"{")
    (record.path / "run.json").write_bytes(b"\xff")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    actual = {run.id: run for run in list_runs(tmp_path)}
    assert sorted(actual) == ["good", "record", "status"]
    assert (actual["good"].state, actual["good"].step, actual["good"].total) == ("running", 5, 10)
    assert (actual["status"].problem or "").startswith(f"{status.path / 'status.json'}: cannot be read: ")
    assert (actual["record"].problem or "").startswith(f"{record.path / 'run.json'}: cannot be read: ")


def test_json_is_whole_or_not_there(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, None, "é"]})
    assert read_json(tmp_path / "a.json") == {"x": [1, None, "é"]}
    with pytest.raises(RunError) as raised:
        read_json(tmp_path / "b.json")
    assert str(raised.value) == f"{tmp_path / 'b.json'}: there is no such file"
    with pytest.raises(TypeError, match="cannot be written as JSON: set"):
        write_json(tmp_path / "a.json", {"x": {1}})
    assert read_json(tmp_path / "a.json") == {"x": [1, None, "é"]}


def test_a_process_is_known_by_more_than_its_pid() -> None:
    me = process_info.current()
    assert me.is_alive()
    assert not process_info.Process(me.pid, (me.started or 0) + 1, me.host).is_alive()
    assert not process_info.Process(me.pid, me.started, "elsewhere").is_alive()
    child = subprocess.Popen([sys.executable, "-c", ""])
    start = process_info.started(child.pid)
    wait_until(lambda: not process_info.is_alive(child.pid, start))
    os.kill(child.pid, 0)  # the zombie still answers
    child.wait()
    assert process_info.started(child.pid) is None
    assert not process_info.is_alive(0, None)


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Every version is whole, and no write fails: each thread has a temporary file of its own."""
    path, begin = tmp_path / "plan.json", threading.Barrier(4)

    def write(number: int) -> None:
        begin.wait()
        for turn in range(25):
            write_json(path, {"thread": number, "turn": turn})
            assert read_json(path)["turn"] in range(25)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
