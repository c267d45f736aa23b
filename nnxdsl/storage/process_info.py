"""Identity and liveness of processes, clocks, and the environment of an attempt: versions, git state, arguments."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

PACKAGES = ("nnxdsl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "qwix", "numpy", "cattrs")

_SECRET = re.compile(r"(?i)((?:token|secret|password|passwd|api[-_]?key)[\w.-]*[=:])\S+|\bhf_[A-Za-z0-9]{8,}")
_GIT_SECONDS = 5.0


@attrs.frozen
class Process:
    """A process, distinct from a later one with the same pid.

    `started` is field 22 of /proc/<pid>/stat (clock ticks since boot); None where there is no /proc.
    """

    pid: int
    started: int | None
    host: str

    def is_here(self) -> bool:
        """Whether it belongs to this machine, so that its pid can be looked up."""
        return self.host == hostname()

    def is_alive(self) -> bool:
        """Whether it runs on this machine: the pid exists, started at the same tick, and is no zombie."""
        return self.is_here() and is_alive(self.pid, self.started)


def current() -> Process:
    """This process."""
    pid = os.getpid()
    return Process(pid, started(pid), hostname())


def hostname() -> str:
    """The name of this machine."""
    return socket.gethostname()


def started(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it is gone or there is no /proc."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, start: int | None) -> bool:
    """Whether `pid` is the process that started at `start` (None: any process with the pid) and is no zombie.

    `os.kill(pid, 0)` is not enough: it also succeeds for zombies and for later processes with the same pid.
    """
    if pid <= 0:
        return False
    if not Path("/proc/self/stat").exists():
        return _accepts_signals(pid)
    fields = _stat(pid)
    if not fields or fields[0] in ("Z", "X", "x"):
        return False
    return start is None or int(fields[19]) == start


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on; the second, the command, may contain spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 1 :].split()


def _accepts_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def clock() -> dict[str, Any]:
    """The current time twice: the wall clock, and the monotonic clock, which is valid until the next boot."""
    return {"wall": time.time(), "monotonic": time.monotonic(), "boot": _boot()}


def seconds_since(then: dict[str, Any]) -> float:
    """Seconds since `then` (from `clock`), at least 0; by the monotonic clock if `then` is from this boot."""
    now = clock()
    same_boot = now["boot"] is not None and now["boot"] == then.get("boot")
    name = "monotonic" if same_boot else "wall"
    value = then.get(name)
    return max(0.0, now[name] - float(value)) if isinstance(value, int | float) else float("inf")


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def utc() -> str:
    """The current time as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def environment(argv: Sequence[str] | None = None, cwd: Path | None = None) -> dict[str, Any]:
    """The environment of an attempt, for its record; never fails and imports none of the packages it names.

    Args:
        argv: The command; None for that of this process. Values that look like secrets are replaced by `***`.
        cwd: The directory whose git state is recorded; None for the working directory.

    Returns:
        time, argv, cwd, host, pid, platform, python, versions, git (None outside a repository).
    """
    directory = Path.cwd() if cwd is None else cwd
    return {
        "time": utc(),
        "argv": [redact(argument) for argument in (sys.argv if argv is None else argv)],
        "cwd": str(directory),
        "host": hostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
        "git": git_state(directory),
    }


def redact(text: str) -> str:
    """Replaces values after `token=`, `secret=`, `password=` or `api_key=`, and Hub tokens, by `***`."""
    return _SECRET.sub(lambda match: f"{match[1] or ''}***", text)


def import_path() -> str:
    """The `PYTHONPATH` with which a child process finds every module that this one finds."""
    return os.pathsep.join(dict.fromkeys(str(Path(place).resolve()) for place in sys.path))


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit and whether files differ from it; None where git or a repository is missing or times out."""
    git = shutil.which("git")
    if git is None:
        return None
    commit = _git(git, directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(git, directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(git: str, directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            [git, "--no-optional-locks", *arguments],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed, by name; imports none of them."""
    versions: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
