"""The trainer: preparation, precomputed caches, the training loop, evaluation, resume."""
