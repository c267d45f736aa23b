"""Crash-safe files: atomic JSON and directories, JSON lines, manifests, mutexes, free disk space."""
