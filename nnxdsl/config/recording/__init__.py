"""Checkpoints, experiment trackers, and the log of rollouts."""
