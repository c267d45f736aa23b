"""What a page is: functions from a question (URL, payload) to pieces of HTML; knows neither gradio nor any one page.

A page is one file with a `PAGE = Page(...)` that is listed in `app/pages.py`:

    def opened(site: Site, ask: Ask) -> Answer:          # its URL was opened, or its query has changed
        return Answer({"main": tag("h1", "Layout of ", ask.query.get("run", "nothing"))})

    PAGE = Page(name="layout", path="/layout", title="Layout", regions=("main",),
                actions={"open": opened, "tick": ticked, "compile": Action(compile_, writes=True)})

- `regions` are the pieces of the page, from top to bottom; an answer names those that it replaces. A piece that did not
  change is not sent again, so that text that is selected stays selected: keep pieces that change often small.
- `open` is asked when the page is opened and whenever its query changes; a form with `data_query=True` writes its
  fields to the query; links to pages (`?tab=log` too) are followed without loading the page again. What is selected
  lives in the query alone.
- `tick` is asked again and again while a piece on the page has `data_tick=SECONDS` and the page is in front.
- Other actions: `tag("button", "Stop", data_do="run.stop", data_id=run.id)` asks `stop` with the payload `{"id": ...}`;
  `tag("form", ..., data_do="new.change")` asks with `{"fields": {name: text}}` when it is submitted, and with
  `data_live=True` at every change. `data_confirm="Kill it?"` asks first; `data_confirm_name="abc"` has the name typed.
- Actions that write are `Action(function, writes=True)`: in read-only mode they do not exist.
- Errors of nnxdsl become a notice. What takes longer than a moment is a child process: `site.jobs` (`app/jobs.py`).
- Numbers and times: `app/words.py`. Anything that a run supplied goes through `app/html.py`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from .html import Html

if TYPE_CHECKING:
    from .state import Site


@attrs.frozen
class Ask:
    """What the browser asks.

    Attributes:
        query: The URL's query; the last of several values of a name.
        payload: What an action was given: `data-*` of its element, `fields` of its form.
        client: Who asks, for the record of actions.
    """

    query: Mapping[str, str]
    payload: Mapping[str, Any] = attrs.Factory(dict)
    client: str = ""

    def text(self, name: str, limit: int = 200) -> str:
        """A text of the payload; empty where there is none, cut at `limit` characters."""
        value = self.payload.get(name, "")
        return value[:limit] if isinstance(value, str) else ""

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the form that was sent."""
        given = self.payload.get("fields")
        if not isinstance(given, dict):
            return {}
        return {str(name): value for name, value in given.items() if isinstance(value, str)}


@attrs.frozen
class Answer:
    """What becomes of the page.

    Attributes:
        regions: New HTML by region; the others stay as they are.
        notice: A sentence for the page's line of notices, which screen readers read out; None leaves it.
        bad: Whether the notice tells of something wrong.
        goto: A path of the app to go to.
        query: A query to write into the URL, without opening the page again.
        copy: Text for the clipboard.
    """

    regions: Mapping[str, Html] = attrs.Factory(dict)
    notice: str | None = None
    bad: bool = False
    goto: str | None = None
    query: str | None = None
    copy: str | None = None


Function = Callable[["Site", Ask], Answer]


@attrs.frozen
class Action:
    """A function that pages ask by name; one that `writes` does not exist in read-only mode."""

    function: Function
    writes: bool = False


@attrs.frozen(kw_only=True)
class Page:
    """One page: its URL, its pieces and what may be asked of it."""

    name: str
    path: str
    title: str
    regions: tuple[str, ...]
    actions: Mapping[str, Function | Action]
    in_navigation: bool = True

    def offered(self, read_only: bool) -> dict[str, Function]:
        """The actions that there are."""
        found: dict[str, Function] = {}
        for name, action in self.actions.items():
            if isinstance(action, Action):
                if not (read_only and action.writes):
                    found[name] = action.function
            else:
                found[name] = action
        return found
