"""The client for whom a page is shown or an action is done."""

from __future__ import annotations

from contextvars import ContextVar

CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")  # its address; empty where there is none
