"""What a run records: its checkpoints, and its metrics in trackers."""
