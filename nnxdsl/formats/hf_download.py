"""Finds or downloads the local directory of a Hugging Face Hub repository; the only module that uses a network."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnxdsl.errors import WeightsError

_CONFIGS = ["*.json"]
_FILES = [*_CONFIGS, "*.safetensors", "*.jinja", "tokenizer.model"]
_SECONDS = 5.0
"""Timeout of the first request; without a network a run is refused after about this time."""

_snapshots: dict[tuple[str, bool], Path] = {}
"""Repositories that this process has located, and whether only their JSON files: each is opened as it was then."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate(path: str, *, configs_only: bool = False, report: Callable[[int, int], object] | None = None) -> Path:
    """The local directory of a path or repository name; downloads a repository that is not cached.

    Args:
        path: A directory, or the name of a repository.
        configs_only: Whether JSON files are enough, of what has to be downloaded.
        report: Called while it is downloaded, in any thread, with the bytes that are done and all bytes; None for
            progress bars of huggingface_hub.

    Raises:
        WeightsError: There is no such directory, and no such repository or no network.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not _NAME.fullmatch(path):
        raise WeightsError(f"{path}: no such directory (relative to {Path.cwd()}), nor the name of a repository")
    for key in ((path, False), (path, configs_only)):
        if key in _snapshots and _snapshots[key].is_dir():
            return _snapshots[key]
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise WeightsError(f"{path}: no such directory; to download it, pip install 'nnxdsl[hub]'") from None
    try:
        files = _CONFIGS if configs_only else _FILES
        bars = {} if report is None else {"tqdm_class": _reporting(report)}
        snapshot = Path(hub.snapshot_download(path, allow_patterns=files, etag_timeout=_SECONDS, **bars))
    except Exception as error:  # of many types: no network, no such repository, licence not accepted
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{path}: no such directory (relative to {Path.cwd()}), and it cannot be downloaded: {reason}; "
            f"without a network, copy the repository's files to a directory and name that"
        ) from error
    _snapshots[path, configs_only] = snapshot
    return snapshot


def _reporting(report: Callable[[int, int], object]) -> type:
    """A progress bar of tqdm, which huggingface_hub depends on, that reports bytes and is not drawn."""
    base: Any = importlib.import_module("tqdm").tqdm

    class Bar(base):
        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                report(int(self.n), int(self.total))

    return Bar
