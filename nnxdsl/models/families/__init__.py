"""The published families, one file each: their sizes, and their spelling of the Hub's `config.json`."""
