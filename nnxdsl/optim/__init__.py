"""Optimizers, learning-rate schedules and step guards, on optax."""
