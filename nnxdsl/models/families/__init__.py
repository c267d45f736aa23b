"""The published families, one file each: sizes, and how they spell the `config.json` of the Hugging Face Hub."""
