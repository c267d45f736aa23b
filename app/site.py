"""The pages as one gradio app: each is a route of its own; the one at "/" is gradio's root page, which is no route."""

from __future__ import annotations

import asyncio
import json
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.themes import Base

from nnxdsl.errors import RunError

from . import api
from .components import notices
from .downloads import PATH, Downloads
from .markup import tag
from .page import Page
from .pages import PAGES
from .security.access import Access, session_key
from .security.guard import Guard, Needed
from .settings import ANY, PATHS, TOKEN_VARIABLE, Settings
from .state import Site

STATIC = Path(__file__).parent / "static"
CLOSED: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""Routes of FastAPI that the app has not."""
END_SECONDS = 5  # in which requests in progress may end when the app does


class Pages(gr.Blocks):
    """All pages of an app, which bring their styles and scripts wherever they are served."""

    def __init__(self, site: Site, pages: tuple[type[Page], ...]) -> None:
        self._page_head, self._added_head = _head(site.settings.root, pages), ""
        super().__init__(analytics_enabled=False, title="nnxdsl", fill_width=True)
        with self:
            for page in sorted(pages, key=lambda page: page.path != "/"):
                if page.path == "/":
                    api.add(site)
                else:  # as `self.route` does, whose `with` would describe and serve all pages so far, once for each
                    self.current_page = page.path.strip("/")
                    self.pages.append((self.current_page, page.title, True))
                _header(site, pages, page.path)
                page(site)

    @property
    def head(self) -> str:
        """The pages' own elements of the document's head, then those that whoever serves them adds."""
        return self._page_head + self._added_head

    @head.setter
    def head(self, value: str | None) -> None:
        self._added_head = value or ""


def build(site: Site, pages: tuple[type[Page], ...] = PAGES) -> gr.Blocks:
    """Builds all pages of an app without serving them."""
    return Pages(site, pages)


def serve(settings: Settings) -> None:
    """Serves an app until the process is ended by a signal; raises if its port is in use or cannot be opened."""
    try:  # before pages are built, which takes seconds
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise RunError(f"--port {settings.port}: {error}; choose another one, or --port 0") from error
    port = listening.getsockname()[1]
    site = Site(settings)
    blocks = build(site)
    access = Access.of(settings, port, session_key(settings.app_directory))
    inner = Downloads(_mounted(FastAPI(**CLOSED), blocks, "/", settings, server_port=port), site)
    guard = Guard(Needed(inner, frozenset(page.path for page in PAGES)), settings, access)
    # Client address and host come from the connection and our own checks, not from forwarding headers.
    config = uvicorn.Config(
        guard,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=END_SECONDS,
    )
    print(_greeting(settings, port, access.token), flush=True)
    _Server(config, site, access).run([listening])


class _Server(uvicorn.Server):
    """Ends what requests may wait for before it waits for requests: child processes, and delays of wrong passwords."""

    def __init__(self, config: uvicorn.Config, site: Site, access: Access) -> None:
        super().__init__(config)
        self._site, self._access = site, access

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends delays and child processes, then the server."""
        self._access.close()
        await asyncio.to_thread(self._site.close)
        await super().shutdown(sockets)


def _greeting(settings: Settings, port: int, token: str) -> str:
    """What is printed: the address, with the token if it was generated; a configured one may not be logged."""
    host = "localhost" if settings.host in ANY else f"[{settings.host}]" if ":" in settings.host else settings.host
    secret = "password" if settings.password else f"token of {TOKEN_VARIABLE}" if settings.token else ""
    address = f"{settings.proxy or f'http://{host}:{port}'}/{'' if secret else f'?token={token}'}"
    note = f"; sign in with the {secret}" if secret else ""
    return f"nnxdsl app on {address} (runs in {settings.home}){note}; Ctrl-C stops the app, not its runs"


def embedded(home: Path, path: str, read_only: bool) -> gr.Blocks:
    """Returns all pages for an app of somebody else; see `nnxdsl.app.blocks`."""
    return build(_site_at(home, path, read_only))


def mount(app: FastAPI, home: Path, path: str, read_only: bool, options: Mapping[str, Any]) -> FastAPI:
    """Mounts all pages in an app of somebody else; see `nnxdsl.app.mount`."""
    site = _site_at(home, path, read_only)
    downloads: Any = Downloads(app, site)
    app.router.add_route(f"{site.settings.root}{PATH}", downloads)
    return _mounted(app, build(site), site.settings.root or "/", site.settings, **options)


def _site_at(home: Path, path: str, read_only: bool) -> Site:
    if not PATHS.fullmatch(path):
        raise RunError(f"path: expected one such as /training, got {path!r}")
    return Site(Settings(home=home.absolute(), read_only=read_only, path=path.rstrip("/")))


def _mounted(app: FastAPI, blocks: gr.Blocks, path: str, settings: Settings, **options: Any) -> FastAPI:
    """Mounts the pages below a path of an app.

    `blocks.launch` is not used, since it requests a page from its own server and puts its middleware in front of ours.
    """
    blocks.queue(api_open=False)
    # gradio's queue would poll for events 1,000 times a second and for progress 100 times a second: 6 % of a core.
    blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free = 0.03, 0.5
    mount_options: dict[str, Any] = {
        "server_name": settings.host,
        "root_path": settings.root if path == "/" else None,
        "ssr_mode": False,
        "mcp_server": False,
        "enable_monitoring": False,
        "run_history": False,
        "footer_links": [],
        "show_error": False,
        "max_file_size": settings.limits.upload_bytes,
        "theme": Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        "app_kwargs": CLOSED,
    }
    with warnings.catch_warnings():  # rendering on the server is off, and yet gradio warns that pages have none
        warnings.filterwarnings("ignore", "SSR mode")
        return gr.mount_gradio_app(app, blocks, path=path, **{**mount_options, **options})


def _head(root: str, pages: tuple[type[Page], ...]) -> str:
    """All static files, `app.*` first, with what the scripts know of the app."""
    css, js = ("\n".join(file.read_text("utf-8") for file in sorted(STATIC.glob(kind))) for kind in ("*.css", "*.js"))
    titles = {page.path: page.title for page in pages}
    shared = f"window.nnx = {{ root: {json.dumps(root)}, titles: {json.dumps(titles)} }};"
    # `css=` is not used: it rewrites selectors and drops those inside @media.
    return f'<style>{css}</style><script>{shared}\n{js}</script><link rel="icon" href="data:,">'


def _header(site: Site, pages: tuple[type[Page], ...], current: str) -> None:
    root = site.settings.root
    links = [
        tag("a", page.title, href=f"{root}{page.path}", aria_current="page" if page.path == current else None)
        for page in pages
        if page.in_navigation
    ]
    header = tag(
        "header",
        tag("a", "nnxdsl", href=f"{root}/", cls="brand"),
        tag("nav", links, aria_label="Pages"),
        tag("span", "read-only", cls="badge") if site.settings.read_only else None,
        cls="top",
    )
    gr.Navbar(visible=False)
    gr.HTML(header, apply_default_css=False, padding=False, container=False)
    notices.add(site.alerts, root)
