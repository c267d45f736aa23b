"""The process: `jax.distributed`, XLA flags, the compilation cache, the allocator, prefetching, signals."""
