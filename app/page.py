"""The interface of a page: functions from a request (`Ask`: URL query, payload) to pieces of HTML (`Answer`).

A page is one file with a `PAGE = Page(...)` that is listed in `app/pages.py`:

    def opened(site: Site, ask: Ask) -> Answer:          # URL opened or query changed
        return Answer({"main": tag("h1", "Layout of ", ask.query.get("run", "nothing"))})

    PAGE = Page(name="layout", path="/layout", title="Layout", regions=("main",),
                actions={"open": opened, "tick": ticked, "compile": Action(compile_, writes=True)})

- `regions` are the pieces of the page, from top to bottom; an answer has those that it replaces. Unchanged pieces are
  not sent again, so that selected text stays selected: keep frequently changing pieces small.
- `open` is called when the page is opened and whenever its query changes; a form with `data_query=True` writes its
  fields to the query; links to pages (also `?tab=log`) are followed without reloading the document. The state of a page
  is in its query only.
- `tick` is polled while an element on the page has `data_tick=SECONDS` and the browser tab is visible.
- Other actions: `tag("button", "Stop", data_do="run.stop", data_id=run.id)` calls `stop` with the payload
  `{"id": ...}`; `tag("form", ..., data_do="new.change")` calls with `{"fields": {name: text}}` on submit, and with
  `data_live=True` at every change. `data_confirm="Kill it?"` asks for confirmation; `data_confirm_name="abc"` requires
  typing the name.
- Actions that write are `Action(function, writes=True)`: in read-only mode they do not exist.
- An `NnxdslError` becomes a notice. Slow work runs in a child process: `site.jobs` (`app/jobs.py`).
- `app/words.py` formats numbers and times. `app/html.py` escapes all text that a run supplies.
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
    """A request of the browser.

    Attributes:
        query: Query of the URL; the last value of a repeated name.
        payload: Arguments of an action: `data-*` of its element, `fields` of its form.
        client: Address of the client, for the audit log.
    """

    query: Mapping[str, str]
    payload: Mapping[str, Any] = attrs.Factory(dict)
    client: str = ""

    def text(self, name: str, limit: int = 200) -> str:
        """Returns a text of the payload, truncated to `limit` characters; empty if missing."""
        value = self.payload.get(name, "")
        return value[:limit] if isinstance(value, str) else ""

    @property
    def fields(self) -> dict[str, str]:
        """Fields of the submitted form."""
        given = self.payload.get("fields")
        if not isinstance(given, dict):
            return {}
        return {str(name): value for name, value in given.items() if isinstance(value, str)}


@attrs.frozen
class Answer:
    """A response: updates of the page.

    Attributes:
        regions: New HTML by region; other regions are unchanged.
        notice: Message for the page's notice line, which screen readers announce; None leaves it unchanged.
        bad: Whether the notice is an error.
        goto: Path of the app to navigate to.
        query: Query to write into the URL, without opening the page again.
        copy: Text to copy to the clipboard.
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
    """A function that pages call by name; if it `writes`, it does not exist in read-only mode."""

    function: Function
    writes: bool = False


@attrs.frozen(kw_only=True)
class Page:
    """A page: its URL, regions and actions."""

    name: str
    path: str
    title: str
    regions: tuple[str, ...]
    actions: Mapping[str, Function | Action]
    in_navigation: bool = True

    def offered(self, read_only: bool) -> dict[str, Function]:
        """Returns the available actions."""
        found: dict[str, Function] = {}
        for name, action in self.actions.items():
            if isinstance(action, Action):
                if not (read_only and action.writes):
                    found[name] = action.function
            else:
                found[name] = action
        return found


@attrs.frozen(kw_only=True)
class GradioPage:
    """A page of gradio components at a URL of its own.

    Attributes:
        name: Short name.
        path: Its URL below the app.
        title: Its title in the navigation.
        build: Adds the components; `app/view.py` connects them with the query of the URL.
        in_navigation: Whether it is in the navigation.
    """

    name: str
    path: str
    title: str
    build: Callable[[Site], None]
    in_navigation: bool = True
