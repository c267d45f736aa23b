"""Experiments that are being written, one file each: a reload, another tab or a new app find them as they were."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import read_json, write_json

MAX_DRAFTS = 200
_NAME = re.compile(r"[0-9a-f]{12}")


@attrs.frozen
class Draft:
    """One.

    Attributes:
        id: Its name in URLs.
        texts: What its fields say, by path.
        base: The experiment that it began with, as JSON; what is marked as changed differs from it.
        base_name: What people call that.
    """

    id: str
    texts: dict[str, str]
    base: dict[str, Any]
    base_name: str


class Drafts:
    """A directory of drafts; the oldest go when there are many."""

    def __init__(self, place: Path) -> None:
        """Makes nothing yet."""
        self._place = place

    def new(self, texts: dict[str, str], base: dict[str, Any], base_name: str) -> Draft:
        """A draft of its own."""
        draft = Draft(secrets.token_hex(6), texts, base, base_name)
        self._place.mkdir(parents=True, exist_ok=True)
        self.save(draft)
        files = sorted(self._place.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_DRAFTS]:
            with contextlib.suppress(OSError):
                old.unlink()
        return draft

    def save(self, draft: Draft) -> None:
        """Replaces its file."""
        self._place.mkdir(parents=True, exist_ok=True)
        write_json(self._place / f"{draft.id}.json", attrs.asdict(draft))

    def load(self, name: str) -> Draft:
        """The draft of this name.

        Raises:
            RunError: there is none, any more.
        """
        if not _NAME.fullmatch(name):
            raise RunError("this is no draft's name; begin again from a preset or a run")
        try:
            tree = read_json(self._place / f"{name}.json")
            return Draft(name, dict(tree["texts"]), dict(tree["base"]), str(tree["base_name"]))
        except (RunError, KeyError, TypeError, ValueError) as error:
            raise RunError("this draft is gone; begin again from a preset or a run") from error
