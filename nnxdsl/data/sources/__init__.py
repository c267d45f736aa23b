"""Other people's data as chunks of rows: a file for each group of formats, paths, digests, and datasets of the Hub."""
