"""The DSL: frozen, typed attrs classes from which experiments are built. Imports no jax."""
