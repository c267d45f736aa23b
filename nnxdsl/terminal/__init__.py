"""What is printed: progress, tables, the plan, pictures of sharded arrays. Loads no jax."""
