"""A run over time: directory, lock, checkpoints, display; only checkpoint, loop and generate use jax."""
