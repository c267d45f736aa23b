"""Hooks (callbacks) of the training loop: `base.Hook` is the interface, each other file is one hook."""
