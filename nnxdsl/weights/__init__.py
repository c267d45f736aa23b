"""Weights in and out: where they come from, export, conversion, comparison."""
