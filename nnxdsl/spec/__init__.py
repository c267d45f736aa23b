"""What is asked: frozen, strict objects that know nothing of jax, files or devices."""
