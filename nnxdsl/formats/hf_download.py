"""Names on the Hugging Face Hub to local directories; the only place that may use a network."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from nnxdsl.errors import WeightsError

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_SECONDS = 5.0
"""For the Hub's first answer; without a network a run is refused about so soon."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate(path: str) -> Path:
    """The local directory of a path or of a repository's name, downloading the latter if it is not cached yet.

    Raises:
        WeightsError: no such directory, and no such repository or no network.
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
        return Path(hub.snapshot_download(path, allow_patterns=_FILES, etag_timeout=_SECONDS))
    except Exception as error:  # the library raises many kinds: no network, no such repository, no licence accepted
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{path}: no such directory (relative to {Path.cwd()}), and it cannot be downloaded: {reason}; "
            f"where there is no network, copy the repository's files to a directory and name that"
        ) from error
