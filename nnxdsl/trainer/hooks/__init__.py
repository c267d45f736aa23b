"""What a run does beside its training steps: `base.Hook` is the interface, each other file is one hook of a run."""
