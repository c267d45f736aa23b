"""Downloads: the files of a run that are listed here, and what pages export. Plain ASGI, no gradio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO
from urllib.parse import parse_qsl

import attrs
from starlette.responses import PlainTextResponse, StreamingResponse

from nnxdsl.errors import RunError

from .pages.compare.runs import compared, grouped
from .pages.compare.tables import to_csv as compared_csv
from .pages.compare.tables import to_html, to_markdown
from .pages.layout.request import arrays_csv
from .pages.outputs.export import TYPES as OUTPUTS
from .pages.outputs.export import exported
from .pages.outputs.request import MOST_PROMPTS
from .security.guard import App, Receive, Scope, Send
from .state import Site
from .store.series import to_csv

PATH = "/download"
CSV = "text/csv; charset=utf-8"
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

FIGURES = "metrics.csv"  # generated from `metrics.jsonl` on request

COMPARISONS = {
    "csv": (lambda groups, query: compared_csv(groups), CSV),
    "md": (lambda groups, query: to_markdown(groups), "text/markdown; charset=utf-8"),
    "html": (to_html, "text/html; charset=utf-8"),
}
"""What `/download?compare=ID,ID&as=KIND` serves of one run or several, with content types.

`filter`, `group` and the choices of the charts are those of the Compare page's query."""

REFUSAL = f"no such run or file; file must be one of {', '.join((*TYPES, FIGURES))}"
"""The same for any request, so that it reveals nothing about other directories."""

CHUNK = 1 << 20

Query = Mapping[str, str]
Download = tuple[str, str, Iterable[bytes]]
"""A file's name, which is a run id or plain words, its content type and its content."""


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
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        try:
            if scope["method"] != "GET":
                raise RunError(REFUSAL)
            name, kind, content = await asyncio.to_thread(self._file, query)
        except (RunError, OSError) as error:
            await PlainTextResponse(f"{error if 'outputs' in query else REFUSAL}\n", 404)(scope, receive, send)
            return
        # Without a length: a file may grow meanwhile.
        headers = {"content-type": kind, "content-disposition": f'attachment; filename="{name}"'}
        await StreamingResponse(content, headers=headers)(scope, receive, send)

    def _file(self, query: Query) -> Download:
        if "outputs" in query:
            return self._outputs(query["outputs"], query.get("format", "jsonl"))
        if "layout" in query:
            if (layout := arrays_csv(self.site, query)) is None:
                raise RunError(REFUSAL)
            return layout[0], CSV, [layout[1].encode()]
        if "compare" in query or "filter" in query:
            return self._compared(query, query.get("as", "csv"))
        run, name = query.get("run", ""), query.get("file", "")
        if name == FIGURES:
            text = to_csv(self.site.series.of(self.site.run(run).file("metrics.jsonl")).columns)
            return f"{run}-{name}", CSV, [text.encode()]
        if name not in TYPES:
            raise RunError(REFUSAL)
        return f"{run}-{name}", TYPES[name], _chunks(self.site.run(run).file(name).open("rb"))

    def _compared(self, query: Query, kind: str) -> Download:
        runs, _ = compared(self.site, {**query, "ids": query.get("compare", "")})
        if kind not in COMPARISONS or not runs:
            raise RunError(REFUSAL)
        written, content_type = COMPARISONS[kind]
        name = f"compared-runs.{kind}" if len(runs) > 1 else f"{runs[0].row.id}.{kind}"
        return name, content_type, [written(grouped(runs, query.get("group", "")), query).encode()]

    def _outputs(self, keys: str, kind: str) -> Download:
        """Cached model outputs, by their keys with commas between them."""
        requests = [self.site.answers.find(key) for key in keys.split(",")[:MOST_PROMPTS]]
        results = [one.result for one in requests if one is not None and one.result is not None]
        first = requests[0]
        if first is None or len(results) < len(requests) or kind not in OUTPUTS:
            raise RunError("this answer is no longer stored; generate it again")
        name = f"{first.model.run}-step-{first.model.step}-{first.request['do']}.{kind}"
        return name, OUTPUTS[kind], [exported(results, kind).encode()]


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK):
            yield chunk
