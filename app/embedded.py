"""The pages in an app of somebody else: without a server and a token of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from nnxdsl.errors import RunError

from .downloads import PATH, Downloads
from .settings import PATHS, Settings
from .site import build, mounted
from .state import Site


def blocks(home: Path, path: str, read_only: bool) -> gr.Blocks:
    """Returns all pages; see `nnxdsl.app.blocks`."""
    return build(_site(home, path, read_only))


def mount(app: FastAPI, home: Path, path: str, read_only: bool, options: Mapping[str, Any]) -> FastAPI:
    """Mounts all pages; see `nnxdsl.app.mount`."""
    site = _site(home, path, read_only)
    app.router.add_route(f"{site.settings.root}{PATH}", Downloads(app, site))
    return mounted(app, build(site), site.settings.root or "/", site.settings, **options)


def _site(home: Path, path: str, read_only: bool) -> Site:
    if not PATHS.fullmatch(path):
        raise RunError(f"path: expected one such as /training, got {path!r}")
    return Site.of(Settings(home=home.absolute(), read_only=read_only, path=path.rstrip("/")))
