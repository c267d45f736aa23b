"""Tokenizers: bytes and Hugging Face files, chat templates, special tokens."""
