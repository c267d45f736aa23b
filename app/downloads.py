"""Downloads: the files of a run that are listed here, and cached outputs. Plain ASGI, no gradio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qs

import attrs

from nnxdsl.errors import RunError

from .pages.compare.groups import grouped
from .pages.compare.report import to_html
from .pages.compare.runs import compared
from .pages.compare.tables import to_csv as compared_csv
from .pages.compare.tables import to_markdown
from .pages.layout.request import arrays_csv
from .pages.outputs.export import TYPES as OUTPUTS
from .pages.outputs.export import exported
from .security.guard import App, Receive, Scope, Send
from .state import Site
from .store.series import to_csv

PATH = "/download"
TYPES = {
    "experiment.py": "text/x-python",
    "experiment.json": "application/json",
    "metrics.jsonl": "application/jsonl",
    "samples.jsonl": "application/jsonl",
    "rollouts.jsonl": "application/jsonl",
    "events.jsonl": "application/jsonl",
    "log.txt": "text/plain",
}
"""Files of a run that `/download?run=ID&file=NAME` serves, with their content types."""

FIGURES = "metrics.csv"
"""Generated from `metrics.jsonl` on request."""

COMPARISONS = {
    "csv": (lambda groups, query: compared_csv(groups), b"text/csv; charset=utf-8"),
    "md": (lambda groups, query: to_markdown(groups), b"text/markdown; charset=utf-8"),
    "html": (to_html, b"text/html; charset=utf-8"),
}
"""What `/download?compare=ID,ID&as=KIND` serves of one run or several, with content types.

`filter`, `group` and the choices of the charts are those of the Compare page's query."""

CHUNK = 1 << 20


@attrs.define
class Downloads:
    """Serves `/download`, and passes all other requests on."""

    app: App
    site: Site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"].removeprefix(self.site.settings.root) != PATH:
            await self.app(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if "outputs" in query:
            await self._outputs(query["outputs"][-1], query.get("format", ["jsonl"])[-1], scope["method"], send)
            return
        if "layout" in query:
            await self._arrays({name: values[-1] for name, values in query.items()}, scope["method"], send)
            return
        if "compare" in query or "filter" in query:
            await self._compared({name: values[-1] for name, values in query.items()}, scope["method"], send)
            return
        run, name = query.get("run", [""])[-1], query.get("file", [""])[-1]
        if name == FIGURES:
            await self._figures(run, scope["method"], send)
            return
        try:
            if scope["method"] != "GET" or name not in TYPES:
                raise RunError(f"file: expected one of {', '.join(TYPES)}")
            path = self.site.run(run).file(name)
            file = path.open("rb")
        except (RunError, OSError):
            await _refuse(send)
            return
        with file:
            await _start(send, 200, TYPES[name].encode(), f"{run}-{name}")
            while chunk := file.read(CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _figures(self, run: str, method: str, send: Send) -> None:
        """Answers `/download?run=ID&file=metrics.csv`: one row per step, one column per metric."""
        try:
            if method != "GET":
                raise RunError("only GET is supported")
            path = self.site.run(run).file("metrics.jsonl")
        except (RunError, OSError):
            await _refuse(send)
            return
        text = await asyncio.to_thread(lambda: to_csv(self.site.series.of(path).columns))
        await _send_all(send, 200, text.encode(), b"text/csv; charset=utf-8", f"{run}-{FIGURES}")

    async def _arrays(self, query: Mapping[str, str], method: str, send: Send) -> None:
        """Answers `/download?layout=arrays.csv&run=ID&mesh=...`: the arrays of a plan that a page has shown."""
        found = await asyncio.to_thread(arrays_csv, self.site, query) if method == "GET" else None
        if found is None:
            await _refuse(send)
            return
        name, text = found
        await _send_all(send, 200, text.encode(), b"text/csv; charset=utf-8", name)

    async def _compared(self, query: Mapping[str, str], method: str, send: Send) -> None:
        """Answers `/download?compare=ID,ID&as=csv`: metrics and differing settings of runs."""
        kind = query.get("as", "csv")
        runs, _ = await asyncio.to_thread(compared, self.site, {**query, "ids": query.get("compare", "")})
        if method != "GET" or kind not in COMPARISONS or not runs:
            await _refuse(send)
            return
        written, content_type = COMPARISONS[kind]
        text = await asyncio.to_thread(written, grouped(runs, query.get("group", "")), query)
        name = f"compared-runs.{kind}" if len(runs) > 1 else f"{runs[0].row.id}.{kind}"
        await _send_all(send, 200, text.encode(), content_type, name)

    async def _outputs(self, key: str, kind: str, method: str, send: Send) -> None:
        """Answers `/download?outputs=KEY&format=csv`: cached model outputs."""
        try:
            request = self.site.answers.find(key)
            if method != "GET" or request is None or request.result is None:
                raise RunError("this answer is no longer stored; generate it again")
            text = exported(request.result, kind)
        except RunError as error:
            await _send_all(send, 404, f"{error}\n".encode(), b"text/plain; charset=utf-8", None)
            return
        name = f"{request.model.run}-step-{request.model.step}-{request.request['do']}.{kind}"
        await _send_all(send, 200, text.encode(), OUTPUTS[kind].encode(), name)


async def _refuse(send: Send) -> None:
    """Sends the same response for any request, so that it reveals nothing about other directories."""
    text = f"no such run or file; file must be one of {', '.join((*TYPES, FIGURES))}\n"
    await _send_all(send, 404, text.encode(), b"text/plain; charset=utf-8", None)


async def _send_all(send: Send, status: int, body: bytes, kind: bytes, name: str | None) -> None:
    await _start(send, status, kind, name)
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, kind: bytes, name: str | None) -> None:
    headers = [(b"content-type", kind)]
    if name is not None:  # run ids are plain names
        headers.append((b"content-disposition", f'attachment; filename="{name}"'.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
