"""All pages, in the order of the navigation."""

from __future__ import annotations

from ..page import Page
from .about import About
from .compare.page import Compare
from .data.page import Data
from .export import Export
from .layout.page import Layout
from .new.page import NewRun
from .outputs.page import Outputs
from .rollouts import Rollouts
from .run.page import Run
from .runs import Runs
from .sweeps.page import Sweeps
from .system import System

PAGES: tuple[type[Page], ...] = (
    Runs,
    Run,
    NewRun,
    Data,
    Compare,
    Sweeps,
    Layout,
    Outputs,
    Rollouts,
    Export,
    System,
    About,
)
