"""A process that has loaded jax and nnxdsl and touched no device: what is forked from it starts at once.

To load them takes seconds, and a run that is to be killed hundreds of times has no seconds to give. It reads JSON
lines: what to start, answered by a pid; or a pid to wait for, answered by how it ended (as `subprocess` has it).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any

LOADED = ("nnxdsl.cli.run", "nnxdsl.cli.plan", "nnxdsl.cli.dispatch", "small_lab.model", "rich.console", "rich.live")


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()  # a fork keeps but the thread that forks
    gc.freeze()
    print(json.dumps({"ready": len(os.listdir("/proc/self/task"))}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = ended(asked["wait"], asked["seconds"]) if "wait" in asked else {"pid": born(asked)}
        print(json.dumps(answer), flush=True)


def ended(pid: int, seconds: float) -> dict[str, int | None]:
    end = time.monotonic() + seconds
    while True:
        result, status = os.waitpid(pid, os.WNOHANG)
        if result:
            return {"code": os.waitstatus_to_exitcode(status)}
        if time.monotonic() > end:
            return {"code": None}
        time.sleep(0.003)


def born(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        for number, name in ((0, "/dev/null"), (1, asked["out"]), (2, asked["err"])):
            file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
        os.chdir(asked["cwd"])
        os.environ.update(asked["environment"])
        if asked["file_bytes"] is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_bytes"], asked["file_bytes"]))
        sys.argv = list(asked["words"])
        sys.path.insert(0, asked["cwd"])
        code = run(sys.argv)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def run(argv: list[str]) -> int:
    """`python WORDS`."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


if __name__ == "__main__":
    main()
