"""Optimizers and what guards their steps, as optax transformations."""
