"""Starting runs somewhere and seeing them to their end: one file an engine, and what they have in common."""
