"""Weights: sources of initial weights, export, conversion, comparison."""
