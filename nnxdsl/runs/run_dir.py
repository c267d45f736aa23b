"""The run directory: what one run writes and anybody may read; knows files, never jax or what is trained."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast, get_args

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.repair import Key, missing, repair
from nnxdsl.runs.status import Liveness, State, Status, liveness_of
from nnxdsl.storage import process_info, records
from nnxdsl.storage.failpoints import reached
from nnxdsl.storage.jsonl import JsonLines, Row, open_plain, read_json, replace, sync_directory, write_json
from nnxdsl.storage.records import problem_in

FORMAT = 1

_STATUS = {"state": records.one_of(get_args(State)), **records.STATUS}
_STEP_NAME = re.compile(r"[0-9]{8,18}")  # a checkpoint's directory
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,80}")
_BEING_MADE = re.compile(r"\.creating-(?P<pid>\d+)-(?P<started>\d+)-.+")


_STATUS_NAMES = frozenset(Status.__annotations__)
_EVALUATION = "evaluation"  # the kind of those rows of metrics.jsonl


@attrs.frozen
class RunSummary:
    """One line of a list of runs; `problem` says what is damaged, the other fields what could be read."""

    id: str
    path: Path
    state: Liveness | None = None
    step: int | None = None
    total: int | None = None
    created: str | None = None
    problem: str | None = None


class RunDirectory:
    """One run's files, under `runs/<id>/`.

    Whoever holds the run's lock writes; anybody reads, and sees whole records however the writer was killed.

    Raises:
        RunError: There is no run there, or its path leads out of its home.
    """

    def __init__(self, path: Path) -> None:
        """Opens an existing run."""
        self.path = checked_path(path)
        self.id = path.name
        record = _identity_record(self.path)
        self.identity: str = record["identity"]
        self.created: str = record["created"]
        self._metrics = _lines_of(self.path / "metrics.jsonl", records.METRICS, "step")
        self._events = _lines_of(self.path / "events.jsonl", records.EVENT)
        self._samples = _lines_of(self.path / "samples.jsonl", records.SAMPLE, "step")
        self._attempts = _lines_of(self.path / "attempts.jsonl", records.ATTEMPT)
        self._last_beat = -float("inf")
        self._writing = threading.RLock()  # a heartbeat may come from another thread than the rest of the status

    @classmethod
    def find(cls, path: Path, *, identity: str) -> RunDirectory | None:
        """Opens the run at `path`; None if there is nothing yet.

        Raises:
            RunError: The id or path will not do, or the directory holds something else; says what to do.
        """
        return None if _is_vacant(checked_path(path)) else cls._existing(path, identity)

    @classmethod
    def create(cls, path: Path, *, identity: str, experiment_json: dict[str, Any], experiment_py: str) -> RunDirectory:
        """Makes a run, or opens it if it is there already and has the same identity.

        All is written in a hidden directory beside `path`, which is then renamed: a kill leaves no half run.

        Args:
            path: `<home>/<run id>`; the home is made if it is missing.
            identity: What the run computes, as one canonical string; compared with what the directory holds.
            experiment_json: The whole experiment, written as `experiment.json`.
            experiment_py: Python that builds the equal experiment, written as `experiment.py`.

        Raises:
            RunError: The id or path will not do, or the directory holds something else; says what to do.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path.parent}: the directory of runs cannot be made: {error.strerror}") from error
        target = checked_path(path)
        if not _is_vacant(target):
            return cls._existing(path, identity)
        _sweep_half_made(path.parent)
        me = process_info.current()
        temporary = path.parent / f".creating-{me.pid}-{me.started or 0}-{path.name}"
        try:
            temporary.mkdir()
            for name in ("checkpoints", "control"):
                (temporary / name).mkdir()
            write_json(temporary / "experiment.json", experiment_json)
            replace(temporary / "experiment.py", experiment_py.encode())
            write_json(temporary / "status.json", {"state": "queued"})
            record = {"format": FORMAT, "identity": identity, "created": process_info.utc()}
            write_json(temporary / "run.json", record)
            reached("run-made")
            os.rename(temporary, target)  # onto nothing or an empty directory; anything else refuses
            reached("run-renamed")
            sync_directory(path.parent)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not _is_vacant(target):  # another process made it in the meantime
                return cls._existing(path, identity)
            raise RunError(f"{path}: the run directory cannot be made: {error}") from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path)

    @classmethod
    def _existing(cls, path: Path, identity: str) -> RunDirectory:
        run = cls(path)
        if run.identity != identity:
            held = read_json(run.path / "experiment.json")
            name = cast(dict[str, Any], held).get("name") if isinstance(held, dict) else None
            raise RunError(
                f"{path} holds another experiment ({name or 'unnamed'}, made {run.created}); "
                f"give this one another directory, or move that one away"
            )
        return run

    def file(self, relative: str) -> Path:
        """The path of an artifact, which must lie inside the run, links followed.

        Raises:
            RunError: It leads out of the run.
        """
        path = (self.path / relative).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise RunError(f"{self.path}: '{relative}' leads out of the run directory; name a file inside it")
        return path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """Where what the process prints is kept."""
        return self.path / "log.txt"

    def experiment(self) -> dict[str, Any]:
        """The experiment as it was when the run was made.

        Raises:
            RunError: `experiment.json` is missing or damaged.
        """
        value = read_json(self.path / "experiment.json")
        if not isinstance(value, dict):
            raise RunError(f"{self.path / 'experiment.json'}: damaged; expected an object, got {type(value).__name__}")
        return cast(dict[str, Any], value)

    def write_layout(self, layout: Any) -> None:
        """Replaces `layout.json`."""
        write_json(self.path / "layout.json", layout)

    def layout(self) -> Any:
        """What `layout.json` holds; None before the first attempt has compiled."""
        path = self.path / "layout.json"
        return read_json(path) if path.exists() else None

    # what it is doing

    def status(self) -> Status:
        """What the writer last said of itself; `liveness` says whether to believe it.

        Raises:
            RunError: `status.json` is missing or damaged.
        """
        value = read_json(self.path / "status.json")
        if not isinstance(value, dict) or cast(dict[str, Any], value).get("state") not in get_args(State):
            states = ", ".join(get_args(State))
            raise RunError(f"{self.path / 'status.json'}: damaged; expected an object with a state ({states})")
        if (problem := problem_in(cast(dict[str, Any], value), _STATUS)) is not None:
            raise RunError(f"{self.path / 'status.json'}: damaged; {problem}; run it again, which writes it anew")
        return cast(Status, value)

    def doubt(self) -> str | None:
        """Why the run has not finished although `status.json` says so; None where it has, or does not say so.

        What is there decides: the newest checkpoint, or the figures of the last step where no checkpoint is left.

        Raises:
            RunError: A file is damaged.
        """
        if self.status().get("state") != "finished":
            return None
        total = self.experiment().get("steps")
        if not records.is_integer(total):
            return None
        saved = self._committed_steps()
        if saved:
            found = f"the newest checkpoint is of step {max(saved)}"
            is_so = max(saved) == total
        else:
            last = self.last_metrics(1)
            found = f"its figures end at step {last[0]['step']}" if last else "there are no figures"
            found = f"there is no checkpoint, and {found}"
            is_so = bool(last) and last[0]["step"] >= cast(int, total) - 1
        if is_so:
            return None
        return f"status.json says that it has finished, but {found} of {total}"

    def _committed_steps(self) -> list[int]:
        """Steps with a manifest; whether they are undamaged, `checkpoint.Checkpoints` says."""
        try:
            entries = list(os.scandir(self.checkpoints))
        except OSError:
            return []
        return [
            int(entry.name)
            for entry in entries
            if _STEP_NAME.fullmatch(entry.name) and Path(entry.path, "manifest.json").is_file()
        ]

    def write_status(self, **fields: Unpack[Status]) -> None:
        """Replaces the given fields, keeps the others, and renews the heartbeat; on disk when it returns.

        A damaged `status.json` is started afresh: what is lost is what the writer is about to say again.

        Raises:
            TypeError: There is no such field.
            RunError: It could not be written.
        """
        unknown = sorted(set(fields) - _STATUS_NAMES)
        if unknown:
            names = ", ".join(sorted(_STATUS_NAMES))
            raise TypeError(f"status has no field {', '.join(unknown)}; there are: {names}")
        with self._writing:
            try:
                status = self.status()
            except RunError:
                status = Status(state="queued")
            status.update(fields)
            status["heartbeat"] = process_info.clock()
            reached("status-unwritten")
            write_json(self.path / "status.json", status)
            reached("status-written")
            self._last_beat = time.monotonic()

    def put_back(self, status: Status) -> None:
        """Makes `status.json` what it was before `take_over`, for an attempt that was refused."""
        with self._writing:
            write_json(self.path / "status.json", status)

    def take_over(self, **fields: Unpack[Status]) -> None:
        """`write_status` with this process as the writer, and what the last attempt ended with forgotten."""
        me = process_info.current()
        cleared = Status(pid=me.pid, pid_started=me.started, host=me.host)
        cleared.update(error=None, exit_code=None, eta_seconds=None)
        cleared.update(fields)
        self.write_status(**cleared)

    def beat(self, *, every_seconds: float = 1.0, **fields: Unpack[Status]) -> bool:
        """`write_status`, at most once in `every_seconds`: cheap at each step. Returns whether it wrote."""
        if time.monotonic() - self._last_beat < every_seconds:
            return False
        self.write_status(**fields)
        return True

    def liveness(self) -> Liveness:
        """What is true of the run now, whatever its writer said last.

        "lost": it says that it runs, but its process is gone (or is on another machine and has been silent).
        "lost" is also a run that says it has finished and has not, see `doubt`.
        "silent": its process lives, but has not been heard of for `SILENT_SECONDS`.
        """
        return "lost" if self.doubt() else liveness_of(self.status())

    # what it has written

    def append_attempt(self, record: Row) -> int:
        """Adds one start of the run, durably, and returns its number, from 1."""
        number = len(self._attempts.read()) + 1
        self._attempts.append({"attempt": number, **record}, durable=True)
        reached("attempt-appended")
        return number

    def append_metrics(self, row: Row) -> None:
        """Adds one training step's figures; `row` has a "step"."""
        self._metrics.append(_with_step(row))
        reached("metrics-appended")

    def append_evaluation(self, row: Row) -> None:
        """Adds one evaluation's figures to `metrics.jsonl`, as a row with "kind": "evaluation"."""
        self._metrics.append({"kind": _EVALUATION, **_with_step(row)})
        reached("evaluation-appended")

    def append_sample(self, row: Row) -> None:
        """Adds one prompt with its answers; `row` has a "step"."""
        self._samples.append(_with_step(row))
        reached("sample-appended")

    def append_event(self, row: Row) -> None:
        """Adds something worth knowing, with the time, durably."""
        self._events.append({"time": process_info.utc(), **row}, durable=True)
        reached("event-appended")

    def attempts(self) -> list[Row]:
        """All starts of the run."""
        return self._attempts.read()

    def started_in(self) -> Path | None:
        """Where the newest attempt was started, if that directory is still there.

        Relative paths in the experiment mean what they meant there.

        Raises:
            RunError: `attempts.jsonl` is damaged.
        """
        attempts = self.attempts()
        where = attempts[-1].get("cwd") if attempts else None
        if where is None:
            return None
        try:
            return Path(where) if Path(where).is_dir() and os.access(where, os.X_OK) else None
        except (OSError, ValueError):  # a name that cannot be: too long, or with a NUL
            return None

    def metrics(self) -> list[Row]:
        """The figures of all training steps."""
        return [row for row in self._metrics.rows() if row.get("kind") != _EVALUATION]

    def last_metrics(self, count: int) -> list[Row]:
        """The last rows of figures, those of evaluations among them; a long file is read from its end."""
        return self._metrics.last(count)

    def evaluations(self) -> list[Row]:
        """The figures of all evaluations."""
        named = f'"{_EVALUATION}"'.encode()  # few among many rows: the others are not read as JSON
        return [row for row in self._metrics.rows(named) if row.get("kind") == _EVALUATION]

    def samples(self) -> list[Row]:
        """All prompts with their answers."""
        return self._samples.read()

    def events(self) -> list[Row]:
        """All that was worth knowing."""
        return self._events.read()

    def require_readable(self) -> None:
        """Looks at all files that a resume reads or adds to, before anything is changed.

        Raises:
            RunError: One of them is no regular file, or an attempt cannot be read; says which, and what to do.
        """
        for lines in (self._metrics, self._samples, self._events, self._attempts):
            lines.require_plain()
        for path in (self.path / "status.json", self.path / "layout.json", self.log):
            with contextlib.suppress(FileNotFoundError):
                os.close(open_plain(path))
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise RunError(f"{self.checkpoints}: is a file, expected a directory of checkpoints; put it back")
        self.attempts()

    def repair_rows(self, start: int, prompts: Sequence[str] = ()) -> list[str]:
        """Makes the rows of metrics, evaluations and samples those of the steps before `start`, each once.

        Events and attempts stay: they happened.

        Args:
            start: The step at which the run is resumed.
            prompts: Those of its evaluations; one that is there twice, now or earlier, may have two samples.

        Returns:
            What was wrong, in words; rows of later steps are not: they are written again.

        Raises:
            RunError: A file cannot be read or written.
        """
        attempts = self.attempts()
        often = Counter(prompts)
        for attempt in attempts:
            often |= _prompts_of(attempt)
        starts = [row.get("start", 0) for row in attempts]
        figures = repair(self._metrics, _key_of_figures, start, starts)
        samples = repair(self._samples, lambda row: _key_of_sample(row, often), start, starts)
        gone = missing((step for step, is_training in figures.rows if is_training), start)
        problems = [*figures.problems, *samples.problems]
        return [*problems, f"metrics.jsonl: there are no figures of {gone}"] if gone else problems

    def sync(self) -> None:
        """Brings all rows to the disk; call it before a checkpoint that they belong to is committed."""
        for lines in (self._metrics, self._samples, self._events, self._attempts):
            lines.sync()

    def close(self) -> None:
        """Lets go of the files that were appended to."""
        for lines in (self._metrics, self._samples, self._events, self._attempts):
            lines.close()

    # what it is asked to do

    def request_stop(self) -> None:
        """Asks the writer to save at the next step boundary and end."""
        try:
            (self.path / "control").mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path / 'control'}: cannot be made: {error.strerror}") from error
        request = {"time": process_info.utc(), "pid": os.getpid(), "host": process_info.hostname()}
        write_json(self.path / "control" / "stop", request)

    def stop_requested(self) -> bool:
        """Whether somebody asked the run to stop."""
        return (self.path / "control" / "stop").exists()

    def clear_requests(self) -> None:
        """Forgets what was asked; for a new attempt, which must not heed what the last one was told.

        What killed writers left half written is swept.
        """
        for path in self.path.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        control = self.path / "control"
        for request in control.iterdir() if control.is_dir() else ():
            with contextlib.suppress(OSError):
                request.unlink()


def checked_path(path: Path) -> Path:
    """The path of a run, with its home resolved; the run itself must not be a link out of it.

    Raises:
        RunError: The id is not a plain lower-case name, or the path leads out of its home.
    """
    if not _RUN_ID.fullmatch(path.name):
        raise RunError(
            f"'{path.name}' cannot be a run id; expected up to 81 of a-z, 0-9, '.', '_' and '-', "
            f"a letter or digit first"
        )
    try:
        home, target = path.parent.resolve(), (path.parent.resolve() / path.name).resolve()
    except (OSError, RuntimeError) as error:
        raise RunError(f"{path}: cannot be followed: {error}") from error
    if target.parent != home:
        raise RunError(f"{path} is a link that leads out of {path.parent}; name the run directory itself")
    return path


def list_runs(home: Path) -> list[RunSummary]:
    """All runs under `home`, newest first; a damaged one is listed with its problem. A missing home has none.

    Directories without a `run.json` are no runs; directories whose name begins with a dot are passed over.

    Raises:
        RunError: `home` is no directory.
    """
    if home.exists() and not home.is_dir():
        raise RunError(f"{home}: is no directory; give the directory of all runs with --home")
    if not home.is_dir():
        return []
    found = [
        _summary(path)
        for path in sorted(home.iterdir())
        if not path.name.startswith(".") and path.is_dir() and (path / "run.json").exists()
    ]
    return sorted(found, key=lambda run: run.created or "", reverse=True)


def _summary(path: Path) -> RunSummary:
    try:
        run = RunDirectory(path)
    except RunError as error:
        return RunSummary(path.name, path, problem=str(error))
    try:
        status = run.status()
        step, total, doubt = status.get("step"), status.get("total"), run.doubt()
        return RunSummary(run.id, path, run.liveness(), step, total, run.created, doubt)
    except RunError as error:
        return RunSummary(run.id, path, created=run.created, problem=str(error))


def _identity_record(path: Path) -> dict[str, str]:
    if not path.is_dir():
        raise RunError(f"{path}: there is no such run")
    if not (path / "run.json").exists():
        held = sorted(entry.name for entry in path.iterdir())
        some = ", ".join(held[:3]) or "nothing"
        some += f" and {len(held) - 3} more" if len(held) > 3 else ""
        raise RunError(f"{path} is no run directory: it has no run.json and holds {some}; name another one")
    record = read_json(path / "run.json")
    fields = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    if not isinstance(fields.get("identity"), str) or not records.is_line(fields.get("created")):
        raise RunError(f"{path / 'run.json'}: damaged; expected an object with identity and created")
    if fields.get("format") != FORMAT:
        raise RunError(
            f"{path / 'run.json'}: written in format {fields.get('format')!r}, but this nnxdsl reads format "
            f"{FORMAT}; use the version that wrote it"
        )
    return fields


def _is_vacant(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _sweep_half_made(home: Path) -> None:
    """Removes what killed creators left behind."""
    for path in home.glob(".creating-*"):
        match = _BEING_MADE.fullmatch(path.name)
        if match and not process_info.is_alive(int(match["pid"]), int(match["started"]) or None):
            shutil.rmtree(path, ignore_errors=True)


def _with_step(row: Row) -> Row:
    if not isinstance(row.get("step"), int):
        raise TypeError(f"the row needs an int 'step', got {row.get('step')!r}")
    return row


def _lines_of(path: Path, kinds: Mapping[str, records.Kind], *required: str) -> JsonLines:
    return JsonLines(path, lambda row: problem_in(row, kinds, required=required))


def _key_of_figures(row: Row) -> Key:
    """An evaluation stands before the training step of the same number."""
    is_training = row.get("kind") != _EVALUATION
    return Key(row["step"], int(is_training))


def _prompts_of(attempt: Row) -> Counter[str]:
    evaluation: Any = attempt.get("experiment", {}).get("evaluation")
    prompts: Any = cast("dict[str, Any]", evaluation).get("prompts") if isinstance(evaluation, dict) else None
    return (
        Counter(one for one in cast("list[Any]", prompts) if isinstance(one, str))
        if isinstance(prompts, list)
        else Counter()
    )


def _key_of_sample(row: Row, often: Mapping[str, int]) -> Key:
    prompt = row.get("prompt", "")
    return Key(row["step"], 0, prompt, max(1, often[prompt]))
