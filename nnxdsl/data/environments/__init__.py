"""Environments of episodes: their classes by name, and the tools that they give to a policy."""
