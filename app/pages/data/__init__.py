"""The Data page: rows as they will be trained on."""
