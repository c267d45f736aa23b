"""From text to token ids: byte and Hugging Face tokenizers, chat templates, special tokens."""
