"""What a run records: its checkpoints, its metrics in trackers, and completions that it samples."""
