"""Sweeps and hyperparameter searches: running them, tables and plots of their results."""
