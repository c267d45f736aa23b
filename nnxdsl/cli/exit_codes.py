"""Exit codes of all commands; `docs/design/reliability.md` says what to do after each."""

FAILED = 1
"""Training failed, or one of many runs did; what was saved last is whole."""

REFUSED = 2
"""Something was refused before anything was written; the message says what."""

INTERRUPTED = 130
"""Ctrl-C, as shells have it; of a run, after it has saved."""
