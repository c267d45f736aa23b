"""The pages as one gradio app: what is drawn where, and how a question travels. The one file that knows gradio.

All pages are in one document, and the browser shows the one of its URL: to change the page costs one request. Questions
are clicks on hidden buttons, whose javascript brings the payload and the query; answers are pieces of HTML.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import attrs

from nnxdsl.errors import NnxdslError

from .access import Access, session_key
from .downloads import Downloads
from .html import Html, tag
from .page import Answer, Ask, Function, Page
from .pages import PAGES
from .security import Guard, Needed, PageRoutes
from .server import Server
from .settings import Settings
from .state import Site

# gradio would report its start and look for a newer version; both are decided when it is imported.
os.environ.update(
    GRADIO_ANALYTICS_ENABLED="False",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    GRADIO_SHARE="False",
    GRADIO_MCP_SERVER="False",
)

import gradio as gr
from fastapi import FastAPI
from gradio.themes import Base

STATIC = Path(__file__).parent / "static"
QUERY_CHARACTERS = 4_000


def build(site: Site, pages: tuple[Page, ...] = PAGES) -> gr.Blocks:
    """All pages of an app, not served yet."""
    with gr.Blocks(analytics_enabled=False, title="nnxdsl", fill_width=True) as blocks:
        gr.HTML(_below(site.settings.root, _navigation(site, pages)), **_PLAIN, elem_id="nnx-top")
        for page in pages:
            _draw(site, page)
    return blocks


@attrs.frozen
class Served:
    """An app that answers.

    Attributes:
        site: What its pages know.
        address: Where it is, for people: with its token, unless they know that or have a password.
        token: What programs send as `Authorization: Bearer TOKEN`.
    """

    site: Site
    address: str
    token: str = attrs.field(repr=False)
    _blocks: gr.Blocks
    _server: Server

    def close(self) -> None:
        """Ends it; runs go on."""
        self.site.close()
        self._blocks.close(verbose=False)
        self._server.close()


def served(settings: Settings) -> Served:
    """Serves an app from now on; the caller ends it with `close`.

    Raises:
        OSError: The port is taken, or there is no such address here.
    """
    server = Server(settings.host, settings.port)
    site = Site.of(settings)
    blocks = build(site)
    access = Access.of(settings, server.port, session_key(settings.own))
    paths = frozenset(page.path for page in PAGES)
    inner = PageRoutes(Downloads(_mounted(blocks, settings, server.port), site), paths)
    server.serve(Guard(Needed(inner, paths), settings, access))
    address = f"{settings.proxy or server.address}/"
    # What the environment gave is not printed, since what is printed may be kept in a log.
    is_told = settings.password is None and settings.token is None
    return Served(site, f"{address}?token={access.token}" if is_told else address, access.token, blocks, server)


def _mounted(blocks: gr.Blocks, settings: Settings, port: int) -> FastAPI:
    """The pages as an ASGI app.

    Not `blocks.launch`, which asks its own server for a page before it goes on, and puts middleware of its own in front
    of ours.
    """
    blocks.queue(api_open=False)
    # Nothing of ours is queued, and gradio would look a thousand times a second whether something is, and a hundred
    # times whether something has got on: together 6 % of a core.
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = 0.5
    return gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        blocks,
        path="/",
        server_name=settings.host,
        server_port=port,
        root_path=settings.root,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        show_error=False,
        max_file_size=settings.limits.upload_bytes,
        theme=Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        head=_head(PAGES, settings.root),
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
    )


_PLAIN: dict[str, Any] = {"apply_default_css": False, "padding": False, "container": False}


def _head(pages: tuple[Page, ...], root: str) -> str:
    page_names = json.dumps({page.path: {"name": page.name, "title": page.title} for page in pages})
    script = _static("js").replace("/*PAGES*/{}", page_names).replace('/*ROOT*/""', json.dumps(root))
    # Not through `css=`, which rewrites selectors and loses those inside @media.
    return f'<style>{_static("css")}</style><script>{script}</script><link rel="icon" href="data:,">'


def _static(kind: str) -> str:
    """All files of one kind, that of the whole app first."""
    files = sorted(STATIC.glob(f"*.{kind}"), key=lambda path: (path.stem != "app", path.name))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def _navigation(site: Site, pages: tuple[Page, ...]) -> Html:
    links = [tag("a", page.title, href=page.path, data_page=page.name) for page in pages if page.in_navigation]
    return tag(
        "header",
        tag("a", "nnxdsl", href="/", cls="brand"),
        tag("nav", links, aria_label="Pages"),
        tag("span", "read only", cls="badge") if site.settings.read_only else None,
        tag("span", "the app does not answer; trying again", cls="offline", role="status", hidden=True),
        cls="top",
    )


def _draw(site: Site, page: Page) -> None:
    with gr.Column(elem_id=f"page-{page.name}", elem_classes=["nnx-page"]):
        notice = gr.HTML("", **_PLAIN, elem_id=f"{page.name}-notice")
        regions = [gr.HTML("", **_PLAIN, elem_id=f"{page.name}-{region}") for region in page.regions]
        payload = gr.Textbox(visible="hidden", container=False)
        query = gr.Textbox(visible="hidden", container=False)
        effect = gr.Textbox(visible="hidden", container=False)
        for name, function in page.offered(site.settings.read_only).items():
            button = gr.Button(visible="hidden", elem_id=f"do-{page.name}-{name}")
            button.click(
                _handler(site, page, function, is_tick=name == "tick"),
                [payload, query],
                [effect, notice, *regions],
                js=f"() => window.nnx.take('{page.name}.{name}')",
                queue=False,
                show_progress="hidden",
                trigger_mode="multiple",
                api_visibility="private",
            ).then(None, [effect], None, js="(text) => window.nnx.effect(text)")


def _handler(site: Site, page: Page, function: Function, *, is_tick: bool) -> Any:
    """A function for gradio: texts in; the effect, the notice and each region's HTML out."""

    def handle(payload: str, query: str, request: gr.Request) -> list[Any]:
        given = _decoded(payload)
        ask = Ask(dict(parse_qsl(query.lstrip("?")[:QUERY_CHARACTERS])), given, _client(request))
        try:
            answer = function(site, ask)
        except NnxdslError as error:
            answer = Answer(notice=str(error), bad=True)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            answer = Answer(
                notice=f"The app itself failed ({type(error).__name__}: {error}). Runs are not affected; "
                "reload the page, and look at what the app printed.",
                bad=True,
            )
        held = given.get("digests")
        held = held if isinstance(held, dict) else {}
        effects = {"name": given.get("name"), "goto": answer.goto, "query": answer.query, "copy": answer.copy}
        effects = {key: value for key, value in effects.items() if value is not None}
        root = site.settings.root
        sent = [_region(name, answer.regions.get(name), held, root) for name in page.regions]
        return [
            json.dumps({**effects, "nonce": secrets.token_hex(4)}),
            _notice(answer, is_tick),
            *sent,
        ]

    return handle


def _region(name: str, html: Html | None, held: dict[str, Any], root: str) -> Any:
    if html is None:
        return gr.skip()
    if not isinstance(html, Html):
        raise TypeError(f"region {name}: expected Html, got {type(html).__name__}")
    html = _below(root, html)
    digest = hashlib.blake2b(html.encode(), digest_size=8).hexdigest()
    if held.get(name) == digest:
        return gr.skip()
    return tag("div", html, cls="region", data_region=name, data_digest=digest)


def _below(root: str, html: Html) -> Html:
    """The same with links to the app's own paths below its root; texts cannot hold such an attribute unescaped."""
    return Html(html.replace(' href="/', f' href="{root}/')) if root else html


def _notice(answer: Answer, is_tick: bool) -> Any:
    if answer.notice is None:
        return gr.skip() if is_tick else ""
    return tag(
        "p", answer.notice, cls="notice bad" if answer.bad else "notice", role="alert" if answer.bad else "status"
    )


def _decoded(payload: str) -> dict[str, Any]:
    try:
        value = json.loads(payload or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _client(request: gr.Request) -> str:
    return getattr(request.client, "host", "") if request is not None and request.client else ""
