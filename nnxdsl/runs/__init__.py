"""The run directory: status, metrics, attempts, lock, log and checkpoints."""
