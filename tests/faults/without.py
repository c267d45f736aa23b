"""What each guard is good for: it is taken out of a copy of the code, and the tests of its row must fail then.

    python tests/faults/without.py [--only ROW] [--json FILE]

Each line of `GUARDS` says what is replaced by what, and which test sees it. A guard without which nothing fails is
reported, and is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Guard:
    """One guard.

    Attributes:
        row: Of the fault matrix.
        what: The guard in words.
        file: Where it stands, seen from `nnxdsl/`.
        old: Its text, which stands there once.
        new: What it becomes.
        test: What must fail then.
    """

    row: str
    what: str
    file: str
    old: str
    new: str
    test: str


KILL = "tests/faults/test_kills.py::test_killed_at_a_point_it_loses_nothing_and_ends_bit_equal"
DAMAGE, DISK, STEPS = "tests/faults/test_damage.py::", "tests/faults/test_disk.py::", "tests/faults/test_steps.py::"
CHANGES, SIGNALS = "tests/faults/test_changes.py::", "tests/faults/test_signals.py::"
PROCESSES, SWEEPS = "tests/trainer/test_processes.py::", "tests/launchers/test_local.py::"

GUARDS = [
    Guard(
        "1, 3", "a step has its name when all of it is there", "runs/checkpointer.py",
        '        manifest.write(place, saving.body)\n        hit_failpoint("commit-unnamed")\n',
        "        os.rename(place, target)\n"
        '        hit_failpoint("commit-unnamed")\n'
        "        manifest.write(target, saving.body)\n"
        "        os.rename(target, place)\n",
        f"{KILL}[commit-unnamed@2]",
    ),
    Guard(
        "1, 3", "what a killed save left is not listed without its manifest", "storage/manifest.py",
        'raise DamageError(f"{NAME} is missing") from error',
        'return {"format": 1, "step": int(place.name), "files": {}, "meta": {}, "arrays": {}}',
        f"{DAMAGE}test_if_all_steps_are_damaged_it_stops_and_touches_nothing",
    ),
    Guard(
        "2", "a step is retired by a rename before its files are deleted", "runs/checkpointer.py",
        'os.rename(place, trash / f"{place.name}-{os.getpid()}-{taken}")',
        'shutil.rmtree(place / "arrays"), (trash / "x").mkdir()',
        f"{KILL}[trash-renamed@1]",
    ),
    Guard(
        "4", "rows beyond the step of a resume are dropped", "trainer/hooks/run_log.py",
        "directory.repair_rows(trainer.start, prompts)", "directory.repair_rows(10**9, prompts)",
        f"{KILL}[metrics-appended@9]",
    ),
    Guard(
        "4", "batches go on where they were", "trainer/batches.py",
        "batch = self.sampler.batch_at(step, self.program.reads)\n",
        'batch = self.sampler.batch_at(step - self.__dict__.setdefault("first", step), self.program.reads)\n',
        f"{KILL}[save-begun@2]",
    ),
    Guard(
        "4", "half written files are swept", "runs/run_dir.py",
        "                path.unlink(missing_ok=True)\n        control", "                pass\n        control",
        f"{KILL}[file-written@9]",
    ),
    Guard(
        "5", "a signal waits for the step boundary", "runtime/signals.py",
        "            self.signal = number\n", "            _leave(number)\n",
        f"{SIGNALS}test_a_signal_saves_at_the_step_boundary",
    ),
    Guard(
        "6", "processes stop when one of them has been told to, not each by itself", "runtime/distributed.py",
        "        if is_single_process():\n            return value\n        before = ",
        "        if is_single_process() or True:\n            return value\n        before = ",
        f"{PROCESSES}test_a_signal_to_one_stops_all_at_one_step",
    ),
    Guard(
        "7", "a second signal ends the process", "runtime/signals.py",
        "            if self.signal is not None:\n                _leave(number)\n", "",
        f"{SIGNALS}test_two_signals_in_the_middle_of_a_save_end_at_once",
    ),
    Guard(
        "8", "the disk is asked before a save", "runs/checkpointer.py",
        "if is_process_0() and (why := disk_space.shortage(self.directory, needed)):", "if why := None:",
        f"{DISK}test_a_save_that_has_no_room_is_refused_before_it_is_written",
    ),
    Guard(
        "8", "a save that failed is said", "runs/checkpointer.py",
        "saving.error = error\n        finally", "pass\n        finally",
        f"{DISK}test_a_write_that_fails_is_said_and_the_last_step_stays",
    ),
    Guard(
        "9", "sizes are compared", "storage/manifest.py",
        'if stat.st_size != entry["size"]:', "if False:",
        "tests/runs/test_checkpoint.py::test_each_damage_has_its_words",
    ),
    Guard(
        "9, 10", "digests are compared", "storage/manifest.py",
        'if _sha256(path) != entry["sha256"]:', "if False:",
        f"{DAMAGE}test_any_damage_to_any_file_of_a_step_is_seen",
    ),
    Guard(
        "11", "a step without its manifest is no step", "runs/checkpoint_reader.py",
        "self._manifest(step)\n                committed.append(step)", "committed.append(step)",
        "tests/runs/test_checkpoint.py::test_each_damage_has_its_words",
    ),
    Guard(
        "12", "the manifest has a digest of its own", "storage/manifest.py",
        "or digest != _digest_of(body):", ":",
        f"{DAMAGE}test_any_damage_to_any_file_of_a_step_is_seen",
    ),
    Guard(
        "13", "damaged steps alone are no reason to begin at 0", "runs/checkpoint_reader.py",
        "        if damaged:\n            lines", "        if not damaged:\n            lines",
        f"{DAMAGE}test_if_all_steps_are_damaged_it_stops_and_touches_nothing",
    ),
    Guard(
        "13", "nor is a step that is gone", "trainer/resume.py",
        "if good.step is None and saved:", "if False:",
        f"{DAMAGE}test_if_all_steps_are_gone_it_stops_and_touches_nothing",
    ),
    Guard(
        "14", "arrays are restored onto the mesh that is asked for", "runs/checkpoint_reader.py",
        "    if target.sharding is not None:\n        return target\n", "",
        f"{CHANGES}test_on_another_mesh_it_begins_bit_exact_and_stays_near",
    ),
    Guard(
        "15", "shapes and dtypes are compared before anything is read", "runs/checkpoint_reader.py",
        "        self._check_targets(step, targets)\n", "",
        f"{CHANGES}test_another_dtype_is_refused_and_never_cast",
    ),
    Guard(
        "15", "a run directory knows what it computes", "runs/run_dir.py",
        "if run.identity != identity:", "if False:",
        f"{CHANGES}test_a_run_directory_of_another_shape_is_refused",
    ),
    Guard(
        "16", "the data's digest is compared", "data/sampler.py",
        '    "digest": "the data file has changed (sha256)",\n', "",
        f"{CHANGES}test_data_that_have_changed_are_refused_by_name",
    ),
    Guard(
        "17", "an order goes by the step alone", "data/sampler.py",
        '"position": position,', '"position": position + position // 7,',
        f"{CHANGES}test_batches_are_the_same_from_every_position",
    ),
    Guard(
        "19", "the lock", "runs/lock.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
        "tests/faults/test_two.py::test_of_two_that_start_together_one_is_refused",
    ),
    Guard(
        "20", "the newest step is that of the largest number", "runs/checkpoint_reader.py",
        "        for step in reversed(self._on_disk()):\n",
        "        for step in sorted(self._on_disk(), key=lambda step: -self._path(step).stat().st_mtime):\n",
        f"{STEPS}test_steps_are_ordered_by_number_and_never_by_time",
    ),
    Guard(
        "20", "on one machine heartbeats go by the clock that does not jump", "storage/process_info.py",
        'name = "monotonic" if same_boot else "wall"', 'name = "wall"',
        "tests/runs/test_run_dir.py::test_a_jump_of_the_wall_clock_changes_nothing",
    ),
    Guard(
        "20", "a heartbeat elsewhere counts when it goes on", "runs/status.py",
        "return now - since <= SILENT_SECONDS if has_changed else fresh", "return fresh",
        f"{STEPS}test_a_live_run_elsewhere_is_not_lost_because_clocks_differ",
    ),
    Guard(
        "21", "a step that is not finite changes nothing", "optim/step_guard.py",
        "is_good = _is_finite(loss, norm) & (before.step >= 0)", "is_good = before.step >= 0",
        f"{STEPS}test_a_nan_stops_with_the_step_its_rows_and_the_weights_from_before",
    ),
    Guard(
        "21", "skipped steps are capped", "trainer/hooks/non_finite.py",
        "if count > getattr(guard, name, count):", "if False:",
        f"{STEPS}test_skipped_steps_are_counted_capped_and_change_nothing",
    ),
    Guard(
        "22", "a loss far above the median is a spike", "optim/step_guard.py",
        "(values[name] > ratio * median)", "(values[name] < 0)",
        f"{STEPS}test_a_spike_is_skipped_and_written_down",
    ),
    Guard(
        "23", "the estimate is compared before anything is compiled", "program/memory.py",
        "    if usable is None:\n", "    if usable:\n",
        f"{CHANGES}test_a_program_that_does_not_fit_is_refused_before_it_is_compiled",
    ),
    Guard(
        "24", "bad rows are refused", "data/loaders/tally.py",
        "if is_whole and count and limit is None:", "if False:",
        f"{CHANGES}test_bad_rows_of_each_kind_are_named_or_counted",
    ),
    Guard(
        "29", "a run that is a link is refused", "runs/run_dir.py",
        "if target.parent != home:", "if False:",
        f"{CHANGES}test_hostile_files_are_refused",
    ),
    Guard(
        "25", "a run is no part of its app's session", "../app/processes/launch.py",
        "environment=variables, start_new_session=True)", "environment=variables)",
        "tests/app/test_runs.py::test_a_run_outlives_the_terminal_of_its_app",
    ),
    Guard(
        "26", "a run that is at work is not launched again", "../app/processes/launch.py",
        "if (writer := self._writer(run)) is not None:", "if False:",
        "tests/app/test_runs.py::test_a_run_is_ended_with_its_group",
    ),
    Guard(
        "27", "silence ends a run", "runtime/distributed.py",
        "is_silent = before == state and now - since > self._lost_seconds", "is_silent = False",
        f"{PROCESSES}test_one_that_hangs_ends_the_others",
    ),
    Guard(
        "28", "a run that failed is but a row of its sweep", "launch/driver.py",
        "        state: State = \"pruned\" if",
        "        if result.state == \"failed\":\n"
        "            raise NnxdslError(str(result.error))\n"
        "        state: State = \"pruned\" if",
        f"{SWEEPS}test_a_crash_ends_one_point_and_failed_ones_are_retried_on_request",
    ),
    Guard(
        "28", "runs that failed before are started again on request alone", "launch/driver.py",
        "elif not self._retry_failed and (before", "elif self._retry_failed and (before",
        f"{SWEEPS}test_a_crash_ends_one_point_and_failed_ones_are_retried_on_request",
    ),
    Guard(
        "29", "templates are rendered in a sandbox", "data/tokenizers/chat_template.py",
        "environment = jinja2.sandbox.ImmutableSandboxedEnvironment(", "environment = jinja2.Environment(",
        "tests/data/test_conversations.py::test_the_sandbox_refuses",
    ),
    Guard(
        "30", "a step is complete before it is committed", "runs/checkpointer.py",
        '        check_complete(self._plain() / WRITING / step_name(saving.step) / ARRAYS, saving.body["arrays"])\n',
        "",
        "tests/runs/test_checkpoint.py::test_a_step_that_lacks_an_array_is_never_committed",
    ),
    Guard(
        "30", "orbax is given a path without patterns", "storage/plain_path.py",
        "    if _is_plain(directory):", "    if True:",
        "tests/runs/test_checkpoint.py::test_a_path_of_any_name_holds_checkpoints",
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="guards of rows or words that hold this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept = tempfile.TemporaryDirectory()
    os.environ.setdefault("NNXDSL_FAULTS_KEPT", kept.name)
    runs = "tests/faults/test_damage.py::test_what_is_beside_the_files_of_a_step_changes_nothing"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "", "-p", "no:cacheprovider", runs]
    subprocess.run(command, cwd=ROOT, check=True)  # the runs that others are compared with, made with all guards
    asked = [guard for guard in GUARDS if options.only is None or options.only in f"{guard.row} {guard.what}"]
    result: dict[str, str] = {}
    for guard in asked:
        result[f"{guard.row}: {guard.what}"] = said = result_without(guard)
        print(f"{guard.row:6}  {guard.what}: {said}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(said.startswith("fails") for said in result.values()) else 1)


def result_without(guard: Guard) -> str:
    """What the test says without the guard."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in ("nnxdsl", "tests", "app"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / "nnxdsl" / guard.file
        text = path.read_text(encoding="utf-8")
        if text.count(guard.old) != 1:
            return f"its text stands {text.count(guard.old)} times in {guard.file}"
        path.write_text(text.replace(guard.old, guard.new), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-x",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            guard.test,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    reported = [line for line in lines if "Error: " in line and "AssertionError" not in line]
    lines = (
        reported[-1:] or [line for line in lines if "assert " in line] or lines
    )  # what the process said, where one did
    if done.returncode == 0:
        return "PASSES WITHOUT IT"
    return f"fails: {lines[0][1:].strip()[:200]}" if lines and done.returncode == 1 else f"BROKEN: {done.stdout[-500:]}"


if __name__ == "__main__":
    main()
