"""Finds or downloads the local directory of a Hugging Face Hub repository; the only module that uses a network."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from nnxdsl.errors import WeightsError

_CONFIGS = ["*.json"]
_FILES = [*_CONFIGS, "*.safetensors", "*.jinja", "tokenizer.model"]
_SECONDS = 5.0
"""Timeout of the first request; without a network a run is refused after about this time."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate(path: str, *, configs_only: bool = False) -> Path:
    """The local directory of a path or repository name; downloads a repository that is not cached.

    Args:
        path: A directory, or the name of a repository.
        configs_only: Whether JSON files are enough, of what has to be downloaded.

    Raises:
        WeightsError: There is no such directory, and no such repository or no network.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not _NAME.fullmatch(path):
        raise WeightsError(f"{path}: no such directory (relative to {Path.cwd()}), nor the name of a repository")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise WeightsError(f"{path}: no such directory; to download it, pip install 'nnxdsl[hub]'") from None
    try:
        files = _CONFIGS if configs_only else _FILES
        return Path(hub.snapshot_download(path, allow_patterns=files, etag_timeout=_SECONDS))
    except Exception as error:  # of many types: no network, no such repository, licence not accepted
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{path}: no such directory (relative to {Path.cwd()}), and it cannot be downloaded: {reason}; "
            f"without a network, copy the repository's files to a directory and name that"
        ) from error
