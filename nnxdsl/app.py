"""The pages of the web app, to mount in an app of one's own; `nnxdsl app` serves them by themselves.

    app = FastAPI()
    nnxdsl.app.mount(app, "runs", path="/training")

They ask nobody for a token: the app around them decides who may open them. Whoever does may read all runs of the home,
and start processes as you where they are not read-only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnxdsl.errors import RunError

if TYPE_CHECKING:
    import gradio as gr
    from fastapi import FastAPI


def blocks(home: str | Path = "runs", *, path: str = "", read_only: bool = True) -> gr.Blocks:
    """Returns all pages as `gradio.Blocks`, with their styles and scripts.

    Files to download are served by `mount` alone.

    Args:
        home: Directory of runs.
        path: Path at which they will be mounted, such as `/training`; empty for the root.
        read_only: Whether actions that write are left out.

    Raises:
        RunError: gradio is not installed.
    """
    return module("site").embedded(Path(home), path, read_only)


def mount(
    app: FastAPI, home: str | Path = "runs", *, path: str = "/nnxdsl", read_only: bool = True, **options: Any
) -> FastAPI:
    """Mounts all pages, and files to download, below a path of an app; returns the app.

    Args:
        app: The app.
        home: Directory of runs.
        path: Path of the app that no other route uses.
        read_only: Whether actions that write are left out.
        options: Further arguments of `gradio.mount_gradio_app`, such as `auth_dependency`.

    Raises:
        RunError: gradio is not installed.
    """
    return module("site").mount(app, Path(home), path, read_only, options)


def module(name: str) -> Any:
    """Imports a module of the app from `nnxdsl/_app` (installed package) or `app` (checkout).

    It is imported by path, since the name `app` may belong to another package.

    Raises:
        RunError: neither directory exists, or gradio is not installed.
    """
    package = Path(__file__).parent
    folders = package / "_app", package.parent / "app"
    folder = next((path for path in folders if (path / "command.py").is_file()), None)
    if folder is None:
        raise RunError(f"the app's files are missing: there is no {folders[0]}; install nnxdsl again")
    whole = "nnxdsl._app"
    if whole not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            whole, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[whole] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[whole])
    try:
        return importlib.import_module(f"{whole}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("gradio", "plotly", "psutil"):
            raise
        raise RunError("the app needs gradio: pip install 'nnxdsl[app]'") from error
