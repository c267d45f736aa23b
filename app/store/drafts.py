"""Drafts of experiments, one file each, so that they survive reloads and restarts of the app."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import read_json, write_json

MAX_DRAFTS = 200
_NAME = re.compile(r"[0-9a-f]{12}")


@attrs.frozen
class Draft:
    """An experiment that is being edited."""

    id: str  # its name in URLs
    texts: dict[str, str]  # of the form's fields by path
    base: dict[str, Any]  # the experiment that it was copied from, as JSON; changed fields are marked relative to it
    base_name: str  # for display
    recipe: str = ""  # the one whose file is launched with the changes as arguments; empty for none
    tab: str = ""  # the browser tab that changed it last; empty before the first change
    revision: int = 0  # number of changes


class Drafts:
    """A directory of drafts; the oldest are deleted when there are too many."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._lock = threading.Lock()

    def new(self, texts: dict[str, str], base: dict[str, Any], base_name: str, recipe: str = "") -> Draft:
        """Creates a draft."""
        draft = self._saved(Draft(secrets.token_hex(6), texts, base, base_name, recipe))
        for old in sorted(self._place.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MAX_DRAFTS]:
            old.unlink(missing_ok=True)
        return draft

    def _saved(self, draft: Draft) -> Draft:
        self._place.mkdir(parents=True, exist_ok=True)
        write_json(self._place / f"{draft.id}.json", attrs.asdict(draft))
        return draft

    def change(self, name: str, texts: dict[str, str], tab: str = "", revision: str = "") -> Draft:
        """Saves the form of a browser tab, which received a revision of the draft; raises if the draft is gone.

        If another tab has changed it since, the form becomes a new draft.
        """
        with self._lock:
            draft = self.load(name)
            if draft.texts == texts:
                return draft
            if tab and draft.tab not in ("", tab) and str(draft.revision) != revision:
                digest = hashlib.sha256(f"{name} {tab}".encode()).hexdigest()[:12]
                draft = attrs.evolve(draft, id=digest)
            return self._saved(attrs.evolve(draft, texts=texts, tab=tab, revision=draft.revision + 1))

    def text(self, name: str) -> str:
        """Contents of a draft's file, even if damaged; empty if there is none."""
        try:
            return (self._place / f"{name}.json").read_text("utf-8", "replace") if _NAME.fullmatch(name) else ""
        except OSError:
            return ""

    def discard(self, name: str) -> None:
        """Deletes a draft if it exists."""
        if _NAME.fullmatch(name):
            (self._place / f"{name}.json").unlink(missing_ok=True)

    def load(self, name: str) -> Draft:
        """Loads a draft; raises `RunError` if it is gone or damaged."""
        if not _NAME.fullmatch(name):
            raise RunError("invalid draft id; start again from a recipe or a run")
        try:
            tree = read_json(self._place / f"{name}.json")
            later = str(tree.get("recipe", "")), str(tree.get("tab", "")), int(tree.get("revision", 0))
            return Draft(name, dict(tree["texts"]), dict(tree["base"]), str(tree["base_name"]), *later)
        except (RunError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError("this draft is deleted or damaged; start again from a recipe or a run") from error
