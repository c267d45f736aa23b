"""Experiments that are being written, one file each: a reload, another tab or a new app find them as they were."""

from __future__ import annotations

import contextlib
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
    """One.

    Attributes:
        id: Its name in URLs.
        texts: What its fields say, by path.
        base: The experiment that it began with, as JSON; what is marked as changed differs from it.
        base_name: What people call that.
        recipe: The recipe whose file is started with what differs; empty for none.
        tab: The browser tab that changed it last; empty before the first change.
        revision: How often it was changed.
    """

    id: str
    texts: dict[str, str]
    base: dict[str, Any]
    base_name: str
    recipe: str = ""
    tab: str = ""
    revision: int = 0


class Drafts:
    """A directory of drafts; the oldest go when there are many."""

    def __init__(self, place: Path) -> None:
        """Makes nothing yet."""
        self._place = place
        self._lock = threading.Lock()

    def new(self, texts: dict[str, str], base: dict[str, Any], base_name: str, recipe: str = "") -> Draft:
        """A draft of its own."""
        draft = Draft(secrets.token_hex(6), texts, base, base_name, recipe)
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

    def change(self, name: str, texts: dict[str, str], tab: str = "", revision: str = "") -> Draft:
        """Saves what a browser tab shows; as a draft of its own if another tab has changed this one since.

        Args:
            name: The draft that the tab shows.
            texts: What its fields say now.
            tab: The tab; empty for a caller that is none.
            revision: The draft's revision when the tab received it.

        Raises:
            RunError: there is no such draft, any more.
        """
        with self._lock:
            draft = self.load(name)
            if draft.texts == texts:
                return draft
            if tab and draft.tab not in ("", tab) and str(draft.revision) != revision:
                own = hashlib.sha256(f"{name} {tab}".encode()).hexdigest()[:12]
                draft = attrs.evolve(draft, id=own)
            draft = attrs.evolve(draft, texts=texts, tab=tab, revision=draft.revision + 1)
            self.save(draft)
            return draft

    def text(self, name: str) -> str:
        """The file of a draft, whatever is in it; empty if there is none."""
        try:
            return (self._place / f"{name}.json").read_text("utf-8", "replace") if _NAME.fullmatch(name) else ""
        except OSError:
            return ""

    def discard(self, name: str) -> None:
        """Deletes a draft, if it is there."""
        if _NAME.fullmatch(name):
            (self._place / f"{name}.json").unlink(missing_ok=True)

    def load(self, name: str) -> Draft:
        """The draft of this name.

        Raises:
            RunError: there is none, any more.
        """
        if not _NAME.fullmatch(name):
            raise RunError("this is not a draft's name; begin again from a recipe or a run")
        try:
            tree = read_json(self._place / f"{name}.json")
            later = str(tree.get("recipe", "")), str(tree.get("tab", "")), int(tree.get("revision", 0))
            return Draft(name, dict(tree["texts"]), dict(tree["base"]), str(tree["base_name"]), *later)
        except (RunError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError("this draft is gone or damaged; begin again from a recipe or a run") from error
