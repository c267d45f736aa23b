"""Gradients of a batch in micro-batches: accumulated, or by GradCache where a loss compares rows of all of them."""
