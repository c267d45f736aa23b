"""A training run from start to end: preparation, precomputed caches, the loop, evaluation, resume."""
