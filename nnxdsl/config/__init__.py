"""The DSL: frozen, typed attrs classes that experiments are made of. Imports no jax and knows no files or devices."""
