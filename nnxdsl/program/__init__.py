"""From an experiment to one training step: `compile` puts the parts together."""
