"""The pages as one gradio app: what is drawn where, and how a question travels. The one file that knows gradio.

All pages are in one document, and the browser shows the one of its URL: to change the page costs one request. Questions
are clicks on hidden buttons, whose javascript brings the payload and the query; answers are pieces of HTML.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from nnxdsl.spec.errors import NnxdslError

from .downloads import Downloads
from .html import Html, tag
from .page import Answer, Ask, Function, Page
from .pages import PAGES
from .security import Guard, PageRoutes
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
from gradio.themes import Base
from starlette.middleware import Middleware

STATIC = Path(__file__).parent / "static"
QUERY_CHARACTERS = 4_000


def build(site: Site, pages: tuple[Page, ...] = PAGES) -> gr.Blocks:
    """All pages of an app, not served yet."""
    with gr.Blocks(analytics_enabled=False, title="nnxdsl", fill_width=True) as blocks:
        gr.HTML(_navigation(site, pages), **_PLAIN, elem_id="nnx-top")
        for page in pages:
            _draw(site, page)
    return blocks


def launch(site: Site, blocks: gr.Blocks, *, block: bool = False) -> str:
    """Serves the pages, and returns their address.

    Raises:
        OSError: the port is taken.
    """
    settings = site.settings
    middleware = [
        Middleware(Guard, settings=settings),
        Middleware(PageRoutes, paths=frozenset(page.path for page in PAGES)),
        Middleware(Downloads, site=site),
    ]
    blocks.queue(api_open=False)
    # Nothing of ours is queued, and gradio would look a thousand times a second whether something is, and a hundred
    # times whether something has got on: together 6 % of a core.
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = 0.5
    _, address, _ = blocks.launch(
        server_name=settings.host,
        server_port=settings.port or _free_port(settings.host),
        prevent_thread_lock=not block,
        quiet=True,
        share=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        show_error=False,
        max_file_size=settings.limits.upload_bytes,
        theme=Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        head=_head(PAGES),
        app_kwargs={"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    return address


_PLAIN: dict[str, Any] = {"apply_default_css": False, "padding": False, "container": False}


def _free_port(host: str) -> int:
    """A port that the system chooses: gradio would take the first from 7860 on, as would the next app."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def _head(pages: tuple[Page, ...]) -> str:
    known = json.dumps({page.path: {"name": page.name, "title": page.title} for page in pages})
    script = _static("js").replace("/*PAGES*/{}", known)
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
        sent = [_region(name, answer.regions.get(name), held) for name in page.regions]
        return [
            json.dumps({**effects, "nonce": secrets.token_hex(4)}),
            _notice(answer, is_tick),
            *sent,
        ]

    return handle


def _region(name: str, html: Html | None, held: dict[str, Any]) -> Any:
    if html is None:
        return gr.skip()
    if not isinstance(html, Html):
        raise TypeError(f"region {name}: expected Html, got {type(html).__name__}")
    digest = hashlib.blake2b(html.encode(), digest_size=8).hexdigest()
    if held.get(name) == digest:
        return gr.skip()
    return tag("div", html, cls="region", data_region=name, data_digest=digest)


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


def served(settings: Settings) -> tuple[Site, gr.Blocks, str]:
    """An app that answers already; for tests and notebooks. `blocks.close()` and `site.close()` end it."""
    site = Site.of(settings)
    blocks = build(site)
    return site, blocks, launch(site, blocks)
