"""Mamba-2: the layer, and its recurrence in chunks."""
