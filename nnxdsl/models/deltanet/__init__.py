"""Gated DeltaNet: the layer and its chunked recurrence."""
