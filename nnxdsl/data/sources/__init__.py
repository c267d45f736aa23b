"""Sources of rows: file formats, paths, digests, and datasets of the Hub."""
