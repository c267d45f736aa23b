"""The numbers and choices that a decoder is built from, as frozen attrs classes without jax."""
