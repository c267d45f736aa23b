"""Runs as files: the list, metrics in columns, what may be done to a run, and whose process it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import numpy as np
import pandas as pd
import pytest

from app.pages import runs as runs_page
from app.pages.run import page as run_page
from app.processes.dispatcher import Dispatcher
from app.processes.launch import Launcher
from app.settings import Limits, Settings
from app.state import Site
from app.store.index import Index
from app.store.series import Columns, Series, sampled, smoothed, thinned, to_csv
from nnxdsl import Optimizer, RunError, Schedule
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines
from tests.app import native
from tests.app.many import experiment, rows, write_many, write_run
from tests.app.on_native import offered, updates
from tests.waiting import wait_until
from tests.work import calls


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "runs", project=tmp_path, limits=Limits(queued=2))


@pytest.mark.extended
def test_a_thousand_runs_are_listed_with_ten_times_the_work_of_a_hundred_and_less_again(
    tmp_path: Path,
) -> None:
    write_many(tmp_path / "hundred", 100, steps=3)
    write_many(tmp_path / "thousand", 1_000, steps=3)
    index = Index(tmp_path / "thousand")
    first = calls(index.rows)
    assert first < 11 * calls(Index(tmp_path / "hundred").rows)
    assert len(index.rows()) == 1_000
    assert calls(index.rows) < first / 10


def test_a_run_whose_process_is_gone_is_lost_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = {"pid": child.pid, "pid_started": process_info.started(child.pid), "host": process_info.hostname()}
    write_run(tmp_path, experiment(0), "running", 3, **who)
    write_run(tmp_path, experiment(1), "running", 3, **{**who, "pid_started": 1})
    index = Index(tmp_path)
    assert {row.id[:8]: row.state for row in index.rows()} == {"dpo-0000": "running", "dpo-0001": "lost"}
    child.kill()  # and not reaped yet: a zombie
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert {row.state for row in index.rows()} == {"lost"}
    child.communicate()


def test_a_run_that_says_it_has_finished_and_has_not_is_lost_and_can_be_resumed(settings: Settings) -> None:
    made = experiment(0)
    path = write_run(settings.home, made, "finished", 100)
    index, launcher = Index(settings.home), Launcher(settings)
    assert index.rows()[0].state == "finished"
    with pytest.raises(RunError, match="has finished"):
        launcher.launch(made)
    place = path / "checkpoints" / "00000040"
    place.mkdir()
    (place / "manifest.json").write_text("{}")
    row = index.rows()[0]
    assert (row.state, row.is_live) == ("lost", False)
    assert "the newest checkpoint is of step 40 of 100" in (row.inconsistency or "")
    site = Site(settings)
    built = native.Built(run_page.Run, site)
    said, buttons = built.shown(id=path.name), offered(built, id=path.name)
    site.close()
    assert any("the newest checkpoint is of step 40 of 100" in str(text) for text in said.values())
    assert "Resume" in buttons
    launch = launcher.resume(path.name)
    launcher.kill(path.name)
    assert launch.run == path.name


def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path) -> None:
    path = write_run(tmp_path, experiment(0), "finished", 3)
    (path / "status.json").write_text("{")
    (row,) = Index(tmp_path).rows()
    assert row.state == "damaged"
    assert "status.json" in (row.problem or "")


def test_metrics_are_read_on_from_where_they_ended_and_anew_when_they_were_cut(tmp_path: Path) -> None:
    file, series = JsonLines(tmp_path / "metrics.jsonl"), Series()
    for step in range(5):
        file.append({"step": step, "attempt": 1, "loss": float(step)})
    assert list(series.of(file.path).columns["loss"].values) == [0, 1, 2, 3, 4]
    with file.path.open("ab") as torn:
        torn.write(b'{"step": 5, "att')
    assert list(series.of(file.path).columns["loss"].steps) == [0, 1, 2, 3, 4]
    file.rewrite([(start, len(line)) for number, start, line in list(file.lines()) if number <= 2])
    file.append({"step": 2, "attempt": 2, "loss": float("nan")})
    actual = series.of(file.path)
    assert list(actual.columns["loss"].steps) == [0, 1, 2]
    assert actual.starts == {1: 0, 2: 2}
    assert np.isnan(actual.columns["loss"].values[2])


def test_smoothing_is_the_average_that_it_says() -> None:
    values = np.sin(np.arange(1_000) / 7) + np.linspace(0, 2, 1_000)
    values[[0, 5, 700]] = np.nan
    held = norm = 0.0
    expected: list[float] = []
    for value in values:
        if np.isfinite(value):
            held, norm = 0.97 * held + 0.03 * value, 0.97 * norm + 0.03
        expected.append(held / norm if norm else np.nan)
    np.testing.assert_allclose(smoothed(values, 0.97), expected, rtol=1e-12)
    assert smoothed(values, 0.0) is values
    assert np.isnan(smoothed(np.full(3, np.nan), 0.9)).all()


def test_csv_of_metrics_has_a_row_per_step_and_empty_cells_where_there_is_no_number() -> None:
    loss = Columns([0.0, 1.0, 1.0, 2.0], [1 / 3, 5.0, 4.0, float("nan")])
    held_out = Columns([0.0, 2.0], [float("inf"), 0.25])
    assert to_csv({"loss": loss, "eval/a,b": held_out}) == 'step,loss,"eval/a,b"\n0,0.333333333,inf\n1,4,\n2,,0.25\n'
    assert to_csv({}) == "step\n"


def test_thinning_keeps_every_spike() -> None:
    steps, values = np.arange(100_000), np.zeros(100_000)
    values[12_345], values[77_777], values[500] = 9.0, -9.0, np.nan
    x, y = thinned(steps, values)
    assert len(x) <= 500
    assert {(12_345, 9.0), (77_777, -9.0)} <= set(zip(x.tolist(), y.tolist(), strict=True))
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize("count", [499, 501, 1_000, 99_999, 100_000, 100_003])
def test_thinning_keeps_the_first_and_the_last_value(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    x, y = thinned(np.arange(count), values)
    assert (y[0], y[-1], x[-1]) == (values[0], values[-1], count - 1)
    assert len(x) <= 500


@pytest.mark.extended
def test_a_hundred_thousand_steps_are_read_once_and_thinned_without_a_call_for_each(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row) + "\n" for row in rows(1_000)]
    path.write_text("".join(lines) * 100)
    series = Series()
    reading = calls(lambda: series.of(path))
    assert reading < 100 * 100_000
    assert len(series.of(path).columns["loss"].steps) == 100_000
    assert calls(lambda: [thinned(*column.arrays()) for column in series.of(path).columns.values()]) < reading / 100
    assert calls(lambda: sampled(path, "loss")) < reading / 100
    assert len(sampled(path, "loss")) > 30


def test_only_runs_of_the_home_can_be_put_away(settings: Settings, tmp_path: Path) -> None:
    path = write_run(settings.home, experiment(0), "finished", 3)
    elsewhere = write_run(tmp_path / "elsewhere", experiment(1), "finished", 3)
    (settings.home / elsewhere.name).symlink_to(elsewhere)
    launcher = Launcher(settings)
    for name in ("..", ".app", "../elsewhere", elsewhere.name, "no-such-run", "a b"):
        with pytest.raises(RunError):
            launcher.trash(name)
    assert elsewhere.is_dir()
    launcher.trash(path.name)
    assert not path.exists()
    assert len(list((settings.home / ".trash").iterdir())) == 1
    assert [row["action"] for row in launcher.audited(path.name)] == ["delete"]


def test_only_processes_that_a_run_recorded_are_ended(settings: Settings) -> None:
    me = {"pid": os.getpid(), "pid_started": 1, "host": process_info.hostname()}  # another process had this pid once
    path = write_run(settings.home, experiment(0), "running", 3, **me)
    launcher = Launcher(settings)
    for act in (launcher.kill, launcher.stop):
        with pytest.raises(RunError, match="no process of it is running"):
            act(path.name)


def test_a_run_is_ended_with_its_group(settings: Settings) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'input()']); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.PIPE)
    who = {"pid": child.pid, "pid_started": process_info.started(child.pid), "host": process_info.hostname()}
    path = write_run(settings.home, experiment(0), "running", 3, **who)
    launcher = Launcher(settings)
    with pytest.raises(RunError, match="already running"):
        launcher.launch(experiment(0))
    with pytest.raises(RunError):  # the lock is free here, but its process lives
        launcher.resume(path.name)
    launcher.stop(path.name)
    assert (path / "control" / "stop").exists()
    launcher.kill(path.name)
    child.communicate()
    assert child.returncode == -9
    wait_until(lambda: living(child.pid) == [])  # its children end when the kernel gets to it


LAUNCH = """
import sys, time
from pathlib import Path
from app.processes.launch import Launcher
from app.settings import Settings
from tests.app.many import experiment

home = Path(sys.argv[1])
print(Launcher(Settings(home=home, project=home.parent)).launch(experiment(0)).process.pid, flush=True)
time.sleep(60)
"""


def test_a_run_outlives_the_terminal_of_its_app(settings: Settings) -> None:
    """A terminal that is closed ends all that it began."""
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", LAUNCH, str(settings.home)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    app = subprocess.Popen(argv, env=environment, cwd=root, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert app.stdout is not None
    run = int(app.stdout.readline())
    os.killpg(app.pid, signal.SIGKILL)
    app.communicate()
    time.sleep(0.2)
    assert living(run) == [str(run)]
    os.killpg(run, signal.SIGKILL)


def living(group: int) -> list[str]:
    """Processes of a group that are more than an entry that nobody has collected."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends while it is read
            state, _, ours = stat.read_text().rpartition(")")[2].split()[:3]
            result += [stat.parent.name] if int(ours) == group and state != "Z" else []
    return result


def test_finished_runs_are_not_started_again(settings: Settings) -> None:
    write_run(settings.home, experiment(0), "finished", 3)
    with pytest.raises(RunError, match="has finished; open it"):
        Launcher(settings).launch(experiment(0))


def test_runs_wait_in_files_in_their_order(settings: Settings) -> None:
    launcher = Launcher(settings)
    launcher.enqueue(experiment(0))
    launcher.enqueue(experiment(1))
    with pytest.raises(RunError, match="2 runs are queued already"):
        launcher.enqueue(experiment(2))
    with pytest.raises(RunError, match="is already queued"):
        Launcher(settings).enqueue(experiment(0))
    assert [one.run for one in Launcher(settings).waiting()] == [experiment(0).id, experiment(1).id]
    assert launcher.move(experiment(1).id, -1) == f"{experiment(1).id} is now number 1 in the queue."
    assert "already first in the queue" in launcher.move(experiment(1).id, -1)
    assert [one.run for one in Launcher(settings).waiting()] == [experiment(1).id, experiment(0).id]
    with pytest.raises(RunError, match="is not queued"):
        launcher.move("other", 1)
    launcher.unqueue(experiment(0).id)
    assert [one.run for one in launcher.waiting()] == [experiment(1).id]


def test_what_waits_begins_only_when_a_slot_is_free(settings: Settings) -> None:
    launcher, index = Launcher(settings), Index(settings.home)
    keeper = Dispatcher(settings, launcher, index)
    keeper.close()
    assert not keeper.start_next()
    me = process_info.current()
    write_run(settings.home, experiment(9), "running", 3, pid=me.pid, pid_started=me.started, host=me.host)
    launcher.enqueue(experiment(0))
    assert not keeper.start_next()
    assert len(launcher.waiting()) == 1


@pytest.mark.parametrize(("module", "absent"), [("app.command", {"gradio", "plotly"}), ("app.site", set())])
def test_no_page_needs_jax_nor_a_command_gradio(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ({"jax", "flax", "orbax", "qwix"} | absent) & set(done.stdout.split())


def _launch(settings: Settings, run: str, exit_code: int | None, ago: float = 60.0) -> None:
    """A start as the app has written it down, of a process that is gone."""
    place = settings.app_directory / "launches" / f"{time.time_ns() - int(ago * 1e9)}-{run}"
    place.mkdir(parents=True)
    record = {"run": run, "pid": 2**22 + 1, "pid_started": 1, "host": process_info.hostname()}
    (place / "launch.json").write_text(json.dumps(record))
    if exit_code is not None:
        (place / "ended.json").write_text(json.dumps({"exit_code": exit_code}))


def test_starts_that_were_refused_stand_in_the_list_for_a_day(settings: Settings) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    shown = write_run(settings.home, experiment(0), "finished", 3)
    for run, code, ago in (
        ("refused-1", 2, 60.0), (shown.name, 2, 60.0), ("old", 2, 2 * 86_400.0), ("done-and-deleted", 0, 60.0),
        ("unknown", None, 60.0), ("once-refused", 2, 60.0), ("once-refused", 0, 30.0),
    ):  # fmt: skip
        _launch(settings, run, code, ago)
    built = native.Built(runs_page.Runs, site)
    table = built.shown()["Dataframe"]
    assert table.loc[table["State"] == "✘ refused", "Run"].tolist() == ["refused-1"]
    assert sorted(table["Run"]) == sorted(["refused-1", shown.name])
    shutil.rmtree(shown)
    assert sorted(built.shown(state="refused")["Dataframe"]["Run"]) == sorted(["refused-1", shown.name])
    site.close()


def test_queued_runs_are_listed_in_their_order_and_moved(settings: Settings) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    for number in (0, 1):
        site.launcher.enqueue(experiment(number))
    first, second = experiment(0).id, experiment(1).id
    built = native.Built(runs_page.Runs, site)
    assert dict(built.shown()["Dataframe"][["Run", "State"]].values) == {
        first: "◷ queued, 1 of 2",
        second: "◷ queued, 2 of 2",
    }
    assert "number 1" in runs_page.move(site, {"ids": second}, -1).notice
    with pytest.raises(RunError, match="Tick one run"):
        runs_page.move(site, {"ids": f"{first},{second}"}, 1)
    runs_page.unqueue(site, {"ids": f"{first},{second}"})
    assert site.launcher.waiting() == []
    site.close()


def test_a_list_has_what_runs_last_said_and_what_is_wrong_with_them(settings: Settings) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    me = process_info.current()
    who = {"pid": me.pid, "pid_started": me.started, "host": me.host}
    live = write_run(settings.home, experiment(0), "running", 40, eta_seconds=310.0, **who)
    nan = write_run(settings.home, experiment(1), "failed", 3)
    JsonLines(nan / "metrics.jsonl").append({"step": 3, "attempt": 1, "loss": float("nan")})
    damaged = write_run(settings.home, experiment(2), "finished", 3)
    (damaged / "status.json").write_text("{")
    built = native.Built(runs_page.Runs, site)
    table = built.shown(ids=live.name)["Dataframe"].set_index("Run")
    assert table.loc[live.name, ["", "State", "Progress", "Heartbeat"]].tolist() == [
        "☑", "▶ running", "40 of 100, 5:10 min left", "now"
    ]  # fmt: skip
    assert table.loc[live.name, "Curve"][0] == "█"
    assert table.loc[nan.name, ["", "Loss"]].tolist() == ["☐", "nan"]
    assert "status.json" in table.loc[damaged.name, "State"]
    assert [value for _, value in updates(built, ids=live.name)["State"]["choices"]] == [
        "",
        "running",
        "failed",
        "damaged",
    ]
    assert built.shown(state="running")["Dataframe"]["Run"].tolist() == [live.name]
    site.close()


@pytest.mark.extended
def test_a_list_of_a_thousand_runs_takes_at_most_ten_times_the_work_of_one_of_a_hundred(settings: Settings) -> None:
    write_many(settings.home, 100, steps=50)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(runs_page.Runs, site)
    hundred = calls(lambda: updates(built))
    site.close()
    shutil.rmtree(settings.home)
    write_many(settings.home, 1_001, steps=50)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(runs_page.Runs, site)
    first = calls(lambda: updates(built))
    assert first < 11 * hundred
    values = updates(built)
    assert len(values["Dataframe"]["value"]) == runs_page.SHOWN
    assert "1,001 runs" in values["Dataframe"]["label"]
    assert "page 1 of 21" in values["Dataframe"]["label"]
    assert calls(lambda: updates(built)) < first
    site.close()


@pytest.mark.parametrize(
    ("steps", "text"), [((), "starting from the beginning"), ((4, 8), "from the checkpoint of step 8")]
)
def test_a_resume_says_from_where(settings: Settings, steps: tuple[int, ...], text: str) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    path = write_run(settings.home, experiment(0), "stopped", 3)
    for step in steps:
        (path / "checkpoints" / f"{step:08d}").mkdir()
        (path / "checkpoints" / f"{step:08d}" / "manifest.json").write_text("{}")
    try:
        assert text in run_page.resume(site, {"id": path.name}).notice
    finally:
        newest = site.launcher.newest(path.name)
        assert newest is not None
        os.killpg(newest.process.pid, signal.SIGKILL)
        while newest.exit_code is None:
            time.sleep(0.05)
        site.close()


def test_a_damaged_last_row_leaves_the_metrics_of_the_one_before_it(tmp_path: Path) -> None:
    path = write_run(tmp_path, experiment(0), "stopped", 3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": \n{"kind": "evaluation", "step": 3, "eval/loss": 1.0}\n')
    (row,) = Index(tmp_path).rows()
    assert row.metrics["step"] == 2


def test_a_running_attempt_has_no_metrics_of_the_one_before_it(tmp_path: Path) -> None:
    me = {"pid": os.getpid(), "pid_started": process_info.started(os.getpid()), "host": process_info.hostname()}
    write_run(tmp_path, experiment(0), "running", 3, attempt=2, **me)
    (row,) = Index(tmp_path).rows()
    assert (row.state, row.metrics) == ("running", {})
    write_run(tmp_path, experiment(1), "running", 3, attempt=1, **me)
    assert Index(tmp_path).row(experiment(1).id).metrics["step"] == 2


def test_a_run_whose_directory_is_gone_is_missing(settings: Settings) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    path = write_run(settings.home, experiment(0), "finished", 3)
    built = native.Built(run_page.Run, site)
    assert updates(built, id=path.name)["Column"]["visible"]
    shutil.rmtree(path)
    shown = updates(built, id=path.name)
    assert not shown["Column"]["visible"]
    assert "missing" in shown["HTML"]["value"]
    site.close()


def test_columns_are_the_settings_in_which_the_listed_runs_differ(settings: Settings) -> None:
    for number, lr in enumerate((1e-4, 3e-4, 1e-3)):
        optimizer = Optimizer.AdamW(schedule=Schedule.Constant(lr=lr))
        write_run(settings.home, experiment(number, optimizer=optimizer, seed=5), "finished", 3)
    write_run(settings.home, experiment(3, seed=6), "failed", 3)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(runs_page.Runs, site)

    def table(**query: str) -> pd.DataFrame:
        return built.shown(**query)["Dataframe"]

    lr = "optimizer.schedule.lr"
    assert {lr, "seed"} <= set(table())
    assert not {"Objective", "Model", "batch_size", "objective.beta"} & set(table())
    assert "seed" not in table(q="seed=5")
    assert table(sort=lr)[lr].tolist() == ["0.0001", "0.0001", "0.0003", "0.001"]
    assert table(sort=lr, desc="1")[lr].tolist() == ["0.001", "0.0003", "0.0001", "0.0001"]
    assert table(q="lr>1e-4")[lr].tolist() == ["0.001", "0.0003"]
    assert table(q="lr>1e-4 loss<0.0001").empty
    assert list(table(columns="Loss,batch_size")) == ["", "Run", "Loss", "batch_size"]
    assert list(table(group="seed", columns="Loss")) == ["", "Run", "seed", "Loss"]
    assert table(group="seed")["seed"].tolist() == ["5", "5", "5", "6"]
    wide = runs_page.widths(table())
    assert all(
        width >= 8 * len(str(one))
        for width, name in zip(wide, table(), strict=True)
        for one in table()[name][:1]
        if name in ("Loss", lr)
    )
    site.close()


def test_a_long_list_has_pages(settings: Settings) -> None:
    write_many(settings.home, runs_page.SHOWN + 3, steps=2)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(runs_page.Runs, site)
    first, last = (built.shown(sort="seed", p=page)["Dataframe"] for page in ("", "2"))
    assert (len(first), len(last)) == (runs_page.SHOWN, 3)
    assert not set(first["Run"]) & set(last["Run"])
    assert built.pressed("Next", {})["query"] == {"p": "2"}
    assert built.pressed("Previous", {"p": "2"})["query"] == {"p": ""}
    assert len(built.shown(p="99")["Dataframe"]) == 3  # the last one
    site.close()


def test_runs_are_grouped_by_their_sweep(settings: Settings) -> None:
    one, *others = (write_run(settings.home, experiment(number), "finished", 3).name for number in range(3))
    place = settings.home / "sweeps" / "rates"
    place.mkdir(parents=True)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(runs_page.Runs, site)
    assert "Sweep" not in built.shown()["Dataframe"]
    (place / "sweep.json").write_text(json.dumps({"kind": "sweep", "points": [{"run": run} for run in others]}))
    table = built.shown(group="Sweep")["Dataframe"]
    assert dict(zip(table["Run"], table["Sweep"], strict=True)) == {one: "", **dict.fromkeys(others, "rates")}
    assert table["Run"].tolist()[-1] == one  # runs of no sweep come last
    (place / "sweep.json").write_text("{")
    assert "Sweep" not in built.shown()["Dataframe"]
    site.close()


def test_damaged_rows_of_metrics_are_counted_on_the_page(settings: Settings) -> None:
    path = write_run(settings.home, experiment(0), "finished", 3)
    site = Site(attrs.evolve(settings, read_only=True))
    built = native.Built(run_page.Run, site)
    assert not any("cannot be read" in str(value) for value in built.shown(id=path.name).values())
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": \n[]\n')
    assert "2 rows of metrics.jsonl cannot be read" in str(built.shown(id=path.name))
    site.close()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_launched_run_whose_directory_is_gone_is_missing_after_a_restart_of_the_app(
    settings: Settings, is_alive: bool
) -> None:
    site = Site(attrs.evolve(settings, read_only=True))
    made = experiment(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    launch = settings.app_directory / "launches" / f"{time.time_ns()}-{made.id}"
    launch.mkdir(parents=True)
    record = {"pid": child.pid, "pid_started": process_info.started(child.pid), "host": process_info.hostname()}
    (launch / "launch.json").write_text(json.dumps(record))
    page, listed = native.Built(run_page.Run, site), native.Built(runs_page.Runs, site)
    if not is_alive:
        child.communicate()
    before = "starting" if is_alive else "refused"
    assert before in updates(page, id=made.id)["HTML"]["value"]
    assert [before in state for state in listed.shown()["Dataframe"]["State"]] == [True] * is_alive
    (launch / "output.txt").write_text(f"starting {settings.home / 'dpo-0000-of-another'}\n")
    assert before in updates(page, id=made.id)["HTML"]["value"]
    with (launch / "output.txt").open("a") as output:
        output.write(f"starting {settings.home / made.id}\nstep 1/100  loss 0.6931\n")
    assert "missing" in updates(page, id=made.id)["HTML"]["value"]
    assert ["missing" in state for state in listed.shown()["Dataframe"]["State"]] == [True] * is_alive
    child.communicate()
    site.close()
