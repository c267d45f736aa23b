"""A process that converts chunks of rows, started by `convert_all`.

It reads pickled objects from its input, first the conversion and then chunks, and writes the result of each chunk. Its
input ends when its parent does, so that no worker outlives a killed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import cloudpickle

from nnxdsl.data.loaders.convert import Conversion, Converted
from nnxdsl.data.loaders.files import Chunk
from nnxdsl.storage import process_info


class Worker:
    """A worker process; a context manager, which ends it.

    Args:
        conversion: The pickled `Conversion`.
    """

    def __init__(self, conversion: bytes) -> None:
        environment = {**os.environ, "PYTHONPATH": process_info.import_path()}
        command = [sys.executable, "-c", "from nnxdsl.data.loaders.worker import main; main()"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(conversion)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, chunk: Chunk) -> Converted:
        """The rows of a chunk as ids.

        Raises:
            DataError: The conversion raised it.
            RuntimeError: The process was killed.
        """
        try:
            self._send(cloudpickle.dumps(chunk))
            assert self._process.stdout is not None
            result = cloudpickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"a process that tokenizes was ended ({self._process.wait()}); memory?") from error
        if isinstance(result, BaseException):
            raise result
        return result

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()


def main() -> None:
    """Converts chunks until the input ends."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a conversion prints is no result
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, and the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    conversion: Conversion = cloudpickle.load(source)
    while True:
        try:
            chunk = cloudpickle.load(source)
        except EOFError:
            return
        try:
            result: object = conversion(chunk)
        except Exception as error:  # raised again by the parent
            result = error
        sink.write(cloudpickle.dumps(result))
        sink.flush()
