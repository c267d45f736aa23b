"""Exit codes of all commands; `docs/design/reliability.md` describes how to recover from each."""

FAILED = 1
"""Training failed, or at least one run of several; the last checkpoint is intact."""

REFUSED = 2
"""Rejected before anything was written; the message gives the reason."""

INTERRUPTED = 130
"""Interrupted by Ctrl-C (128 + SIGINT, as in shells); a run saves a checkpoint first."""
