"""The run directory: status, metrics, attempts, lock, log and checkpoints. The files are the truth."""
