"""Terminal output: progress, tables, the plan, grids of sharded arrays. Loads no jax."""
