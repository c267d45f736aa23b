"""The page that edits and launches an experiment."""
