"""The run directory: the files of one run, their creation, and the status that its process writes; imports no jax."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Unpack, cast, get_args

from nnxdsl.errors import RunError
from nnxdsl.runs.rows import RunRows
from nnxdsl.runs.status import Liveness, State, Status, liveness_of
from nnxdsl.storage import process_info, records
from nnxdsl.storage.atomic_dir import atomic_directory
from nnxdsl.storage.failpoints import hit_failpoint
from nnxdsl.storage.jsonl import open_plain, read_json, replace, write_json
from nnxdsl.storage.records import problem_in

FORMAT = 1

_STATUS = {"state": records.one_of(get_args(State)), **records.STATUS}
_STATUS_NAMES = frozenset(Status.__annotations__)
_STEP_NAME = re.compile(r"[0-9]{8,18}")  # a checkpoint's directory
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,80}")


class RunDirectory(RunRows):
    """One run's files, under `runs/<id>/`.

    The process with the run's lock writes them; any process may read them, and reads whole records even if the writer
    was killed.

    Raises:
        RunError: There is no run there, or its path leads out of its home.
    """

    def __init__(self, path: Path) -> None:
        """Opens an existing run."""
        self.path = checked_path(path)
        super().__init__(self.path)
        self.id = path.name
        record = _identity_record(self.path)
        self.identity: str = record["identity"]
        self.created: str = record["created"]
        self._last_heartbeat = -float("inf")
        self._status_lock = threading.RLock()  # the heartbeat is written by another thread than the rest of the status

    @classmethod
    def find(cls, path: Path, *, identity: str) -> RunDirectory | None:
        """Opens the run at `path`; None if there is nothing yet.

        Raises:
            RunError: The id or path is invalid, or the directory holds something else.
        """
        return None if _is_vacant(checked_path(path)) else cls._existing(path, identity)

    @classmethod
    def create(cls, path: Path, *, identity: str, experiment_json: dict[str, Any], experiment_py: str) -> RunDirectory:
        """Creates a run atomically, or opens it if it exists already and has the same identity.

        Args:
            path: `<home>/<run id>`; the home is created if it is missing.
            identity: What determines the run's results, as one canonical string; compared with an existing run's.
            experiment_json: The whole experiment, written as `experiment.json`.
            experiment_py: Python that builds the equal experiment, written as `experiment.py`.

        Raises:
            RunError: The id or path is invalid, or the directory holds something else.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path.parent}: the directory of runs cannot be made: {error.strerror}") from error
        target = checked_path(path)
        if _is_vacant(target):
            try:
                with atomic_directory(target) as new:
                    for name in ("checkpoints", "control"):
                        (new / name).mkdir()
                    write_json(new / "experiment.json", experiment_json)
                    replace(new / "experiment.py", experiment_py.encode())
                    write_json(new / "status.json", {"state": "queued"})
                    record = {"format": FORMAT, "identity": identity, "created": process_info.utc()}
                    write_json(new / "run.json", record)
                    hit_failpoint("run-made")
                hit_failpoint("run-renamed")
            except RunError:
                if _is_vacant(target):  # else another process has created it in the meantime
                    raise
        return cls._existing(path, identity)

    @classmethod
    def _existing(cls, path: Path, identity: str) -> RunDirectory:
        run = cls(path)
        if run.identity != identity:
            other = read_json(run.path / "experiment.json")
            name = cast(dict[str, Any], other).get("name") if isinstance(other, dict) else None
            raise RunError(
                f"{path} holds another experiment ({name or 'unnamed'}, made {run.created}); "
                f"give this one another directory, or move that one away"
            )
        return run

    def file(self, relative: str) -> Path:
        """The path of an artifact, which must lie inside the run after links are resolved.

        Raises:
            RunError: It leads out of the run.
        """
        path = (self.path / relative).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise RunError(f"{self.path}: '{relative}' leads out of the run directory; name a file inside it")
        return path

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """The log file of this process."""
        return self.path / "log.txt"

    def experiment(self) -> dict[str, Any]:
        """The experiment as it was when the run was created.

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
        """The content of `layout.json`; None before the first attempt has compiled."""
        path = self.path / "layout.json"
        return read_json(path) if path.exists() else None

    def require_readable(self) -> None:
        """Checks all files that a resume reads or appends to, before anything is changed.

        Raises:
            RunError: One of them is no regular file, or an attempt cannot be read.
        """
        super().require_readable()
        for path in (self.path / "status.json", self.path / "layout.json", self.log):
            with contextlib.suppress(FileNotFoundError):
                os.close(open_plain(path))
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise RunError(f"{self.checkpoints}: is a file, expected a directory of checkpoints; restore the directory")

    # status

    def status(self) -> Status:
        """The status that the writer last wrote; `liveness` checks it against the process.

        Raises:
            RunError: `status.json` is missing or damaged.
        """
        value = read_json(self.path / "status.json")
        if not isinstance(value, dict) or cast(dict[str, Any], value).get("state") not in get_args(State):
            states = ", ".join(get_args(State))
            raise RunError(f"{self.path / 'status.json'}: damaged; expected an object with a state ({states})")
        if (problem := problem_in(cast(dict[str, Any], value), _STATUS)) is not None:
            raise RunError(f"{self.path / 'status.json'}: damaged; {problem}; run it again to rewrite the file")
        return cast(Status, value)

    def inconsistency(self) -> str | None:
        """Contradictions of `status.json` "finished" by checkpoints or metrics; None if it is consistent.

        Compares with the newest checkpoint, or with the last step's metrics where no checkpoint is left.

        Raises:
            RunError: A file is damaged.
        """
        if self.status().get("state") != "finished":
            return None
        total = self.experiment().get("steps") or self.status().get("total")  # epochs become steps when a run begins
        if not records.is_integer(total):
            return None
        saved = self._committed_steps()
        if saved:
            evidence = f"the newest checkpoint is of step {max(saved)}"
            is_finished = max(saved) == total
        else:
            last = self.last_metrics(1)
            evidence = f"its metrics end at step {last[0]['step']}" if last else "there are no metrics"
            evidence = f"there is no checkpoint, and {evidence}"
            is_finished = bool(last) and last[0]["step"] >= cast(int, total) - 1
        return None if is_finished else f"status.json says that it has finished, but {evidence} of {total}"

    def _committed_steps(self) -> list[int]:
        """Steps with a manifest; `CheckpointReader` verifies their files."""
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
        """Replaces the given fields of the status and its heartbeat; synced to disk when it returns.

        A damaged `status.json` is started afresh, since the writer repeats its fields.

        Raises:
            TypeError: There is no such field.
            RunError: It could not be written.
        """
        unknown = sorted(set(fields) - _STATUS_NAMES)
        if unknown:
            names = ", ".join(sorted(_STATUS_NAMES))
            raise TypeError(f"status has no field {', '.join(unknown)}; there are: {names}")
        with self._status_lock:
            try:
                status = self.status()
            except RunError:
                status = Status(state="queued")
            status.update(fields)
            status["heartbeat"] = process_info.clock()
            hit_failpoint("status-unwritten")
            write_json(self.path / "status.json", status)
            hit_failpoint("status-written")
            self._last_heartbeat = time.monotonic()

    def restore_status(self, status: Status) -> None:
        """Restores the `status.json` from before `take_over`, for an attempt that was refused."""
        with self._status_lock:
            write_json(self.path / "status.json", status)

    def take_over(self, **fields: Unpack[Status]) -> None:
        """`write_status` with this process as the writer; clears the error and exit code of the last attempt."""
        me = process_info.current()
        cleared = Status(pid=me.pid, pid_started=me.started, host=me.host)
        cleared.update(error=None, exit_code=None, eta_seconds=None)
        cleared.update(fields)
        self.write_status(**cleared)

    def beat(self, *, every_seconds: float = 1.0, **fields: Unpack[Status]) -> bool:
        """`write_status`, at most once in `every_seconds`: cheap at each step. Returns whether it wrote."""
        if time.monotonic() - self._last_heartbeat < every_seconds:
            return False
        self.write_status(**fields)
        return True

    def liveness(self) -> Liveness:
        """The actual state of the run: its status checked against the process and the checkpoints.

        "lost": the status says that it runs, but its process is gone (or is on another machine and has been silent),
        or it says that it has finished, and `inconsistency` finds that it has not.
        "silent": its process lives, but its last heartbeat is older than `SILENT_SECONDS`.
        """
        return "lost" if self.inconsistency() else liveness_of(self.status())

    # requests to the writer

    def request_stop(self) -> None:
        """Asks the writer to save at the next step boundary and exit."""
        try:
            (self.path / "control").mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path / 'control'}: cannot be made: {error.strerror}") from error
        request = {"time": process_info.utc(), "pid": os.getpid(), "host": process_info.hostname()}
        write_json(self.path / "control" / "stop", request)

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called during this attempt."""
        return (self.path / "control" / "stop").exists()

    def clear_requests(self) -> None:
        """Deletes requests to an earlier attempt, and temporary files of killed writers."""
        for path in self.path.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        control = self.path / "control"
        for request in control.iterdir() if control.is_dir() else ():
            with contextlib.suppress(OSError):
                request.unlink()


def checked_path(path: Path) -> Path:
    """The path of a run; the run itself must not be a link out of its home.

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
        raise RunError(f"{path}: cannot be resolved: {error}") from error
    if target.parent != home:
        raise RunError(f"{path} is a link that leads out of {path.parent}; name the run directory itself")
    return path


def _identity_record(path: Path) -> dict[str, str]:
    if not path.is_dir():
        raise RunError(f"{path}: there is no such run")
    if not (path / "run.json").exists():
        names = sorted(entry.name for entry in path.iterdir())
        listed = ", ".join(names[:3]) or "nothing"
        listed += f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RunError(f"{path} is no run directory: it has no run.json and holds {listed}; name another one")
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
