"""Records what nnxdsl computes, and compares it with what was recorded: a net under changes that must change nothing.

    python tests/regression/record.py                   # computes all cases and compares; exit code 1 on a difference
    python tests/regression/record.py NAME ...          # these alone, by name or by kind (training, models, ...)
    python tests/regression/record.py --update [NAME]   # records them anew
    python tests/regression/record.py --exact           # other bits are a difference, too
    python tests/regression/record.py --list            # names and kinds

Results are in tests/regression/*.json, one file for each kind. `results.py` says how they are compared: within 1e-7 of
the largest value of a metric where processor, jax and flags are those that recorded it, else within 1e-5. Programs
are compiled with XLA's own flags, as a user's are: bits depend on them. There are eight virtual CPU devices, whatever
`XLA_FLAGS` says outside.

Cases use what users use: `nnxdsl.*`, `nnxdsl.compile`, `nnxdsl.load` and the command line; what else they need of the
package stands in `batches.py`. Names of fields stand in the tables; a renamed metric is entered in `results.RENAMED`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=8"

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('NNXDSL_REGRESSION_XLA_FLAGS', '')}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["COLUMNS"] = "100"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # every case has a home of its own: nothing is met again

import file_cases  # noqa: E402
import jax  # noqa: E402
import materials  # noqa: E402
import model_cases  # noqa: E402
import plan_cases  # noqa: E402
import results  # noqa: E402
import training_cases  # noqa: E402

import nnxdsl  # noqa: E402

HERE = Path(__file__).parent
KINDS: dict[str, dict[str, Any]] = {
    "training": training_cases.CASES,
    "models": model_cases.CASES,
    "files": file_cases.CASES,
    "plans": plan_cases.CASES,
}
"""Every case by kind; the kind is the name of the file that its results are in."""


def prepare(parent: str) -> None:
    """Has this process work in a new directory below `parent`, with the files that cases work on."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    place = Path(tempfile.mkdtemp(dir=parent))
    materials.make(place)
    materials.register_rewards()
    os.chdir(place)


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: a run takes signals for a wish to stop, and its worker would go on."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def compute(kind: str, name: str) -> tuple[Any, float]:
    """The result of one case, in the form in which it comes back from a file; and the seconds of CPU that it took."""
    began = time.process_time()
    try:
        result = json.loads(json.dumps(KINDS[kind][name]()))
    finally:
        jax.clear_caches()  # no program is used twice
    return result, time.process_time() - began


def load(kind: str) -> dict[str, Any]:
    """What is recorded of a kind: `environment`, and `cases` by name."""
    path = HERE / f"{kind}.json"
    if not path.exists():
        return {"environment": {}, "cases": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def store(kind: str, recorded: dict[str, Any]) -> None:
    """Writes what is recorded of a kind, one line for each case."""
    order = [name for name in KINDS[kind] if name in recorded["cases"]]
    lines = [f"{json.dumps(name)}: {json.dumps(recorded['cases'][name], separators=(',', ':'))}" for name in order]
    head = json.dumps(recorded["environment"])
    text = f'{{"environment": {head},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    (HERE / f"{kind}.json").write_text(text, encoding="utf-8")


def chosen(names: list[str]) -> dict[str, list[str]]:
    """Names of cases by kind, of those that are asked for.

    Raises:
        SystemExit: a name is neither a case nor a kind.
    """
    known = {name for cases in KINDS.values() for name in cases} | KINDS.keys()
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"neither a case nor a kind: {', '.join(unknown)}; --list prints all")
    return {
        kind: [name for name in cases if not names or name in names or kind in names] for kind, cases in KINDS.items()
    }


def main() -> int:
    """Runs what the command line names; 1 if something differs or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases or kinds; all of them if none is named")
    parser.add_argument("--update", action="store_true", help="record anew what is named")
    parser.add_argument("--exact", action="store_true", help="other bits are a failure")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that work at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    options = parser.parse_args()
    cases = chosen(options.names)
    if options.list:
        for kind, names in cases.items():
            print(f"{kind} ({len(names)}): {' '.join(names)}")
        return 0
    return Recorder(update=options.update, exact=options.exact).run(cases, options.jobs)


class Recorder:
    """Runs cases, and compares or records what they give.

    Args:
        update: Whether results are recorded.
        exact: Whether other bits are a failure.
    """

    def __init__(self, *, update: bool, exact: bool) -> None:
        self.update, self.exact = update, exact
        self.now = results.environment()
        self.recorded = {kind: load(kind) for kind in KINDS}
        self.spent = 0.0

    def run(self, cases: dict[str, list[str]], jobs: int) -> int:
        """Runs cases in so many processes; 1 if one of them is not as recorded."""
        if self.update:
            self._require_whole(cases)
        bad, begun = 0, time.monotonic()
        print(f"nnxdsl of {Path(nnxdsl.__file__).parent}")
        print(f"{'case':<32} {'CPU s':>7}  {'worst':>8}  {'bits':<5}  result", flush=True)
        with (
            tempfile.TemporaryDirectory(prefix="nnxdsl-regression-") as place,
            ProcessPoolExecutor(jobs, get_context("spawn"), prepare, (place,)) as pool,
        ):
            waiting = {pool.submit(compute, kind, name): (kind, name) for kind in cases for name in cases[kind]}
            for done in as_completed(waiting):
                bad += not self._judge(*waiting[done], done)
        for kind, recorded in self.recorded.items():
            if gone := sorted(recorded["cases"].keys() - KINDS[kind].keys()):
                bad += len(gone) * (not self.update)
                print(f"recorded in {kind}.json, and no case any more: {', '.join(gone)}")
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in cases.items() if names)
        took = f"{time.monotonic() - begun:.0f} s, {self.spent:.0f} s of CPU"
        print(f"{len(waiting)} cases ({counts}) in {took}; {bad} differ or failed")
        return 1 if bad else 0

    def _require_whole(self, cases: dict[str, list[str]]) -> None:
        """Refuses to mix results of two machines in one file."""
        for kind, names in cases.items():
            recorded = self.recorded[kind]
            if names and recorded["environment"] != self.now and recorded["cases"].keys() - set(names):
                raise SystemExit(f"{kind}.json was recorded on another machine; record all of it: --update {kind}")
            if names and recorded["environment"] != self.now:
                recorded.update(environment=self.now, cases={})

    def _judge(self, kind: str, name: str, done: Future[Any]) -> bool:
        """Prints the line of a case; whether it is as recorded, or was recorded."""
        try:
            result, seconds = done.result()
        except Exception as error:
            traceback.print_exception(error, limit=-6)
            print(f"{name:<32} {'':>7}  {'':>8}  {'':<5}  failed: {type(error).__name__}, see above", flush=True)
            return False
        self.spent += seconds
        recorded = self.recorded[kind]
        before, is_same = recorded["cases"].get(name), recorded["environment"] == self.now
        if self.update:
            recorded["cases"][name] = result
            store(kind, recorded)
        if before is None:
            worst = bits = ""
            said = "recorded" if self.update else "nothing is recorded: --update"
            is_good = self.update
        else:
            difference = results.compare(result, before, is_same=is_same, case=name, exact=self.exact)
            worst, bits = f"{difference.worst:.1e}", "" if not is_same else "other" if difference.notes else "same"
            said = "; ".join(difference.failures) or "as recorded"
            is_good = self.update or not difference.failures
        print(f"{name:<32} {seconds:7.1f}  {worst:>8}  {bits:<5}  {said}", flush=True)
        return is_good


if __name__ == "__main__":
    sys.exit(main())
