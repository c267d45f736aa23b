"""The pages as one gradio app.

Each is a route of its own; the one at "/" is gradio's root page, which is no route. A `Page` is drawn as HTML: requests
are clicks on hidden buttons, whose JavaScript provides the payload and the query.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import attrs
import gradio as gr
from fastapi import FastAPI
from gradio.themes import Base

from nnxdsl.errors import NnxdslError

from . import api
from .downloads import Downloads
from .html import Html, tag
from .page import Answer, Ask, Function, GradioPage, Page
from .pages import PAGES
from .pages import about as about_page
from .pages import export as export_page
from .pages import runs as runs_page
from .pages.compare import page as compare_page
from .pages.data import page as data_page
from .pages.layout import page as layout_page
from .pages.new import page as new_page
from .pages.outputs import page as outputs_page
from .pages.run import page as run_page
from .pages.sweeps import page as sweeps_page
from .security.access import Access, session_key
from .security.guard import Guard, Needed
from .server import Server
from .settings import Settings
from .state import Site
from .view import SCRIPT

GRADIO_PAGES: tuple[GradioPage, ...] = (
    runs_page.PAGE,
    run_page.PAGE,
    new_page.PAGE,
    compare_page.PAGE,
    data_page.PAGE,
    sweeps_page.PAGE,
    export_page.PAGE,
    layout_page.PAGE,
    outputs_page.PAGE,
    about_page.PAGE,
)
NAVIGATION = ("/", "/new", "/data", "/compare", "/sweeps", "/layout", "/outputs", "/export", "/about")
"""Paths of the pages in the navigation, in its order."""
STATIC = Path(__file__).parent / "static"
QUERY_CHARACTERS = 4_000


def build(site: Site, pages: tuple[GradioPage, ...] = GRADIO_PAGES) -> gr.Blocks:
    """Builds all pages of an app without serving them; `pages` are those of gradio components."""
    first = next(page for page in pages if page.path == "/")
    with gr.Blocks(analytics_enabled=False, title="nnxdsl", fill_width=True) as blocks:
        _header(site, pages, first.path)
        first.build(site)
        api.add(site)
    for page in pages:
        if page is not first:
            with blocks.route(page.title, page.path):
                _header(site, pages, page.path)
                page.build(site)
    for old in PAGES:
        with blocks.route(old.title, old.path):
            _header(site, pages, old.path)
            _draw(site, old)
    return blocks


@attrs.frozen
class Served:
    """A running app.

    Attributes:
        site: State of the app.
        address: URL to open; it includes the token if that was generated and there is no password.
        token: Secret for the header `Authorization: Bearer TOKEN`.
    """

    site: Site
    address: str
    token: str = attrs.field(repr=False)
    _blocks: gr.Blocks
    _server: Server

    def close(self) -> None:
        """Stops the app; runs continue."""
        self.site.close()
        self._blocks.close(verbose=False)
        self._server.close()


def served(settings: Settings) -> Served:
    """Starts to serve an app; the caller stops it with `close`.

    Raises:
        OSError: The port is in use, or the address is not available.
    """
    server = Server(settings.host, settings.port)
    site = Site.of(settings)
    blocks = build(site)
    access = Access.of(settings, server.port, session_key(settings.own))
    inner = Downloads(_mounted(blocks, settings, server.port), site)
    routes = frozenset(page.path for page in (*GRADIO_PAGES, *PAGES))
    server.serve(Guard(Needed(inner, routes), settings, access))
    address = f"{settings.proxy or server.address}/"
    # A token from the environment is not printed, since the output may be logged.
    is_told = settings.password is None and settings.token is None
    return Served(site, f"{address}?token={access.token}" if is_told else address, access.token, blocks, server)


def _mounted(blocks: gr.Blocks, settings: Settings, port: int) -> FastAPI:
    """Mounts the pages as an ASGI app.

    `blocks.launch` is not used, since it requests a page from its own server and puts its middleware in front of ours.
    """
    blocks.queue(api_open=False)
    # gradio's queue would poll for events 1,000 times a second and for progress 100 times a second: 6 % of a core.
    blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free = 0.03, 0.5
    with warnings.catch_warnings():  # rendering on the server is off, and yet gradio warns that pages have none
        warnings.filterwarnings("ignore", "SSR mode")
        return _mount(blocks, settings, port)


def _mount(blocks: gr.Blocks, settings: Settings, port: int) -> FastAPI:
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
    written = _static("js").replace("/*PAGES*/{}", page_names).replace('/*ROOT*/""', json.dumps(root))
    titles = json.dumps({page.path: page.title for page in GRADIO_PAGES})
    script = f"{SCRIPT}nnx.root = {json.dumps(root)};\nnnx.titles = {titles};\n{written}"
    # `css=` is not used: it rewrites selectors and drops those inside @media.
    return f'<style>{_static("css")}</style><script>{script}</script><link rel="icon" href="data:,">'


def _static(kind: str) -> str:
    """Concatenates all static files of one kind, `app.*` first."""
    files = sorted(STATIC.glob(f"*.{kind}"), key=lambda path: (path.stem != "app", path.name))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def _header(site: Site, pages: tuple[GradioPage, ...], current: str | None = None) -> None:
    titles = {page.path: (page.title, page.name) for page in (*PAGES, *pages)}
    more = [page.path for page in pages if page.in_navigation and page.path not in NAVIGATION]
    links = [
        tag("a", title, href=path, data_page=name, aria_current="page" if path == current else None)
        for path in (*NAVIGATION, *more)
        for title, name in [titles[path]]
    ]
    header = tag(
        "header",
        tag("a", "nnxdsl", href="/", cls="brand"),
        tag("nav", links, aria_label="Pages"),
        tag("span", "read-only", cls="badge") if site.settings.read_only else None,
        tag("span", "the app does not respond; retrying", cls="offline", role="status", hidden=True),
        cls="top",
    )
    gr.Navbar(visible=False)
    gr.HTML(_below(site.settings.root, header), **_PLAIN)


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
    """Wraps a page function for gradio: texts in; effect, notice and each region's HTML out."""

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
                notice=f"Internal error of the app ({type(error).__name__}: {error}). Runs are not affected; "
                "reload the page, and see the app's output for details.",
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
    """Prefixes links to the app's own paths with its root path; escaped texts cannot contain such an attribute."""
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
