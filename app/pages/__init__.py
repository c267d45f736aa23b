"""All pages, in the order of the navigation."""

from __future__ import annotations

from ..page import Page
from . import about, export, rollouts, runs, system
from .compare import page as compare
from .data import page as data
from .layout import page as layout
from .new import page as new
from .outputs import page as outputs
from .run import page as run
from .sweeps import page as sweeps

PAGES: tuple[Page, ...] = (
    runs.PAGE,
    run.PAGE,
    new.PAGE,
    data.PAGE,
    compare.PAGE,
    sweeps.PAGE,
    layout.PAGE,
    outputs.PAGE,
    rollouts.PAGE,
    export.PAGE,
    system.PAGE,
    about.PAGE,
)
