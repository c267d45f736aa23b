"""Mixtures of experts: the layer, the router, grouped matrix products."""
