"""Loaders: a file for each kind of data, and the report of bad rows."""
